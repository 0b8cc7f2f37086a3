"""The shared queue: one Lua library in Redis, and this process's half of a turn."""
