"""What should happen: pure functions and data. No I/O, no clock, no logging."""
