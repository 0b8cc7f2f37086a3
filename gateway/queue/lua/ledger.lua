-- ledger v1: what is taken on each backend, in integers, so that a drained queue is exactly zero
-- (a limit binds grants only: a lease that its owner declares again after a loss may exceed it)

-- after any change of a backend: its free slots in the pool's record, and the pool's sum
local function settle(P, slot, b)
  local free = 0
  if b and b[B_OPEN] == 1 then free = max(0, b[B_LIMIT] - b[B_RUNNING]) end
  P.left = P.left + free - (P.free[slot] or 0)
  P.free[slot] = free
  P.touched[slot] = true
  P.dirty = true
end

-- a backend that is no longer declared leaves with its last lease
local function retire(P, slot, b)
  names(P)[b[B_NAME]] = nil
  P.renamed = true
  P.backends[slot] = false
  settle(P, slot, false)
end

local function take(P, slot, t, prefill, kv)
  local b = backend(P, slot)
  t[STATE], t[SLOT], t[PREFILL], t[KV] = HELD, slot, prefill, kv
  b[B_RUNNING] = b[B_RUNNING] + 1
  b[B_PREFILL] = b[B_PREFILL] + prefill
  b[B_KV] = b[B_KV] + kv
  settle(P, slot, b)
end

local function give_back(P, t)
  local slot = t[SLOT]
  local b = slot > 0 and backend(P, slot)
  if not b then return end
  b[B_RUNNING] = b[B_RUNNING] - 1
  b[B_PREFILL] = b[B_PREFILL] - t[PREFILL]
  b[B_KV] = b[B_KV] - t[KV]
  settle(P, slot, b)
  P.blocked = 0
  if b[B_OPEN] < 0 and b[B_RUNNING] == 0 then retire(P, slot, b) end
end

-- the prefill and KV parts of a running lease, as absolute values
local function adjust(P, t, prefill, kv)
  local slot = t[SLOT]
  local b = slot > 0 and backend(P, slot)
  if b then
    b[B_PREFILL] = b[B_PREFILL] + prefill - t[PREFILL]
    b[B_KV] = b[B_KV] + kv - t[KV]
    P.touched[slot] = true
    P.dirty = true
  end
  if prefill < t[PREFILL] or kv < t[KV] then P.blocked = 0; P.dirty = true end
  t[PREFILL], t[KV] = prefill, kv
end
