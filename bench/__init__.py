"""How good it is: load, baselines, overhead, reports."""
