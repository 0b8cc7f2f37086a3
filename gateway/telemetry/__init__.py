"""What the gateway tells about itself, all of it from life-cycle transitions."""
