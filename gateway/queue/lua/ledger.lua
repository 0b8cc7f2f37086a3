-- ledger v2: what is taken on each backend, in integers, so that a drained queue is exactly zero
-- (a limit binds grants only: a lease that its owner declares again after a loss may exceed it)
local ROOM, OF = 95, 100 -- part of the KV cache that may be planned with
local WINDOW = 2 -- chunks of prompt that may be outstanding on a backend: what waits there can be neither ordered nor withdrawn

-- sums over a pool's open backends, by which an arrival is judged without reading them
local S_OPEN, S_LIMIT, S_RUNNING, S_PREFILL, S_KV, S_KV_LIMIT = 1, 2, 3, 4, 5, 6
local S_OUTPUTS, S_SPEED, S_LEAN_US, S_FIRST_NS, S_SAFETY = 7, 8, 9, 10, 11
local NO_SHARE = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

local function timed(b) return b[B_STEP_US] + b[B_PREFILL_NS] > 0 end
local function chunk_of(b) return b[B_CHUNK] > 0 and b[B_CHUNK] or 1e6 end
local function context_of(b) return (b[B_PROMPTS] + b[B_KV]) / 2 end -- prompts, and half the outputs over a lease's life

-- microseconds of a step in which `running` decode and no prompt is computed
local function lean_us(b, running, context)
  return b[B_STEP_US] + b[B_RUNNING_US] * running + b[B_KV_NS] * context / 1000
end

-- prompt tokens per second beside what decodes now
local function speed_of(b)
  if not timed(b) then return b[B_RATE] end
  local share = max(1, chunk_of(b) - b[B_RUNNING])
  return floor(share * 1e6 / (lean_us(b, b[B_RUNNING], context_of(b)) + b[B_PREFILL_NS] * share / 1000))
end

local function share_of(b)
  if not b or b[B_OPEN] ~= 1 then return NO_SHARE end
  return {1, b[B_LIMIT], b[B_RUNNING], b[B_PREFILL], b[B_KV], b[B_KV_LIMIT], max(0, b[B_KV] - b[B_PROMPTS]), speed_of(b),
          floor(lean_us(b, max(b[B_LIMIT], b[B_RUNNING]), context_of(b))), b[B_PREFILL_NS], b[B_SAFETY]}
end

-- the backend as it is in the pool's sums: to be called before it changes
local function touch(P, slot)
  local b = backend(P, slot)
  if not P.counted[slot] then P.counted[slot] = share_of(b) end
  return b
end

local function room_of(b)
  if not b or b[B_OPEN] ~= 1 or b[B_RUNNING] >= b[B_LIMIT] then return 0 end
  if b[B_CHUNK] > 0 and b[B_PREFILL] >= WINDOW * b[B_CHUNK] then return 0 end
  local load = b[B_RUNNING] / b[B_LIMIT]
  if b[B_KV_LIMIT] > 0 and b[B_RUNNING] > 0 then
    if OF * b[B_KV] >= ROOM * b[B_KV_LIMIT] then return 0 end
    load = max(load, b[B_KV] / b[B_KV_LIMIT])
  end
  return 1 + floor(1000 * load)
end

-- after any change of a backend: its room; its part of the pool's sums follows when they are read
local function recount(P, slot, b)
  local room, before = room_of(b), P.room[slot] or 0
  for s = #P.room + 1, slot - 1 do P.room[s] = 0 end
  if (room > 0) ~= (before > 0) then P.left = P.left + (room > 0 and 1 or -1) end
  P.room[slot] = room
  P.touched[slot], P.stale[slot] = true, true
  P.dirty = true
end

local function sums_of(P)
  local sums = P.sums
  for slot in pairs(P.stale) do
    local was, is = P.counted[slot], share_of(P.backends[slot])
    for i = 1, #is do sums[i] = sums[i] + is[i] - was[i] end
    P.counted[slot] = is
  end
  P.stale = {}
  return sums
end

-- a backend that is no longer declared leaves with its last lease
local function retire(P, slot, b)
  names(P)[b[B_NAME]] = nil
  P.renamed = true
  P.backends[slot] = false
  recount(P, slot, false)
end

-- the pace objectives of what runs: pairs of milliseconds and how many
local function pace(b, tpot, n)
  if tpot == 0 then return end
  local list = b[B_TPOTS]
  for i = 1, #list, 2 do
    if list[i] == tpot then
      list[i + 1] = list[i + 1] + n
      if list[i + 1] <= 0 then
        list[i], list[i + 1] = list[#list - 1], list[#list]
        list[#list] = nil; list[#list] = nil
      end
      return
    end
  end
  if n > 0 then list[#list + 1] = tpot; list[#list + 1] = n end
end

local function take(P, slot, t, prefill, kv, spread)
  local b = touch(P, slot)
  t[STATE], t[SLOT], t[PREFILL], t[KV], t[SPREAD] = HELD, slot, prefill, kv, spread
  b[B_RUNNING] = b[B_RUNNING] + 1
  b[B_PREFILL] = b[B_PREFILL] + prefill
  b[B_KV] = b[B_KV] + kv
  b[B_SPREAD] = b[B_SPREAD] + spread
  b[B_PROMPTS] = b[B_PROMPTS] + t[PROMPT]
  pace(b, t[TPOT], 1)
  recount(P, slot, b)
end

local function give_back(P, t)
  local slot = t[SLOT]
  local b = slot > 0 and touch(P, slot)
  if not b then return end
  b[B_RUNNING] = b[B_RUNNING] - 1
  b[B_PREFILL] = b[B_PREFILL] - t[PREFILL]
  b[B_KV] = b[B_KV] - t[KV]
  b[B_SPREAD] = b[B_SPREAD] - t[SPREAD]
  b[B_PROMPTS] = b[B_PROMPTS] - t[PROMPT]
  pace(b, t[TPOT], -1)
  recount(P, slot, b)
  P.blocked = 0
  if b[B_OPEN] < 0 and b[B_RUNNING] == 0 then retire(P, slot, b) end
end

-- the prefill and KV parts of a running lease, as absolute values
local function adjust(P, t, prefill, kv, spread)
  local slot = t[SLOT]
  local b = slot > 0 and touch(P, slot)
  if b then
    b[B_PREFILL] = b[B_PREFILL] + prefill - t[PREFILL]
    b[B_KV] = b[B_KV] + kv - t[KV]
    b[B_SPREAD] = b[B_SPREAD] + spread - t[SPREAD]
    recount(P, slot, b)
    if prefill < t[PREFILL] or kv < t[KV] or spread < t[SPREAD] then P.blocked = 0 end
  end
  t[PREFILL], t[KV], t[SPREAD] = prefill, kv, spread
end

local function flush_pools()
  for _, P in pairs(pools) do
    if P and P.dirty then
      local record = {P.blocked, P.last_key, P.max_queued, P.waiting, P.open, P.left, P.fastest, sums_of(P), P.room, P.classes,
                      P.tested}
      local args = {'pool', pack(record)}
      local n, gone = 2, {}
      for slot in pairs(P.touched) do
        local b = P.backends[slot]
        if b then args[n + 1] = 'b' .. slot; args[n + 2] = pack(b); n = n + 2 else gone[#gone + 1] = 'b' .. slot end
      end
      if P.renamed then args[n + 1] = 'names'; args[n + 2] = pack(P.names); n = n + 2 end
      if P.resized then args[n + 1] = 'sizes'; args[n + 2] = pack(P.sizes); n = n + 2 end
      call('HSET', P.key, unpack_list(args))
      if #gone > 0 then call('HDEL', P.key, unpack_list(gone)) end
    end
  end
end
