-- placement v2: which backend takes a ticket now
-- (a ticket's own candidates come best first and by name: the first that fits. Else the most loaded that fits, so that others
--  stay free for what needs them; with one or two backends that with the earliest first token)
local TRIES = 4 -- backends looked at for one ticket
local PACE_ROOM = 0.95 -- part of the tightest pace objective that may be planned with

-- milliseconds to compute `tokens` of prompts in full chunks
local function prefill_ms(b, tokens, running, context)
  if not timed(b) then return b[B_RATE] > 0 and tokens * 1000 / b[B_RATE] or huge end
  local steps = max(1, ceil(tokens / max(1, chunk_of(b) - running)))
  return (steps * lean_us(b, running, context) + b[B_PREFILL_NS] * tokens / 1000) / 1000
end

-- milliseconds per token with this one more, when as many prompts are computed as answers end
local function pace_ms(b, t)
  local running, prompts = b[B_RUNNING] + 1, b[B_PROMPTS] + t[PROMPT]
  local outputs = max(1, b[B_KV] + t[PROMPT] + t[OUTPUT] - prompts)
  local prefill = min(max(0, chunk_of(b) - running), running * prompts / outputs)
  return (lean_us(b, running, context_of(b) + t[PROMPT]) + b[B_PREFILL_NS] * prefill / 1000) / 1000
end

local function tightest(b, t)
  local least = t[TPOT] > 0 and t[TPOT] or huge
  local list = b[B_TPOTS]
  for i = 1, #list, 2 do least = min(least, list[i]) end
  return least
end

local function kv_fits(b, t)
  if b[B_KV_LIMIT] == 0 or b[B_RUNNING] == 0 then return true end
  local mean = b[B_KV] + t[PROMPT] + t[OUTPUT]
  return mean + b[B_DEVIATIONS] / 1000 * sqrt(b[B_SPREAD] + t[VARIANCE]) <= b[B_KV_LIMIT] * ROOM / OF
end

-- milliseconds to the first token with safety, or nil where the deadlines would be missed by starting now
local function on_time(b, t)
  local first = b[B_SAFETY] / 1000 * prefill_ms(b, b[B_PREFILL] + t[UNCACHED], b[B_RUNNING], context_of(b))
  if now + first > t[DEADLINE] then return nil end
  if t[TOTAL] > 0 and timed(b) and now + first + t[HIGH] * pace_ms(b, t) > t[TOTAL] then return nil end
  return first
end

-- the same, or nil where the ticket may not start now
local function fits(b, t)
  if room_of(b) == 0 or not kv_fits(b, t) then return nil end
  if b[B_PREFILL] > 0 and b[B_CHUNK] > 0 and b[B_PREFILL] + t[UNCACHED] > WINDOW * b[B_CHUNK] then return nil end
  if timed(b) and b[B_RUNNING] > 0 and pace_ms(b, t) > PACE_ROOM * tightest(b, t) then return nil end
  return on_time(b, t)
end

local function usable(P, slot) return (P.room[slot] or 0) > 0 and not (P.barred and P.barred[slot]) end

local function first_wanted(P, t)
  local slots, tries = names(P), TRIES
  for _, name in ipairs(t[BACKENDS]) do
    local slot = slots[name]
    if slot and usable(P, slot) then
      if fits(backend(P, slot), t) then return slot end
      tries = tries - 1
      if tries == 0 then return nil end
    end
  end
  return nil
end

local function soonest(P, t)
  local best, least = nil, huge
  for slot = 1, #P.room do
    local first = usable(P, slot) and fits(backend(P, slot), t)
    if first and (first < least or (first == least and P.room[slot] < P.room[best])) then best, least = slot, first end
  end
  return best
end

-- the most loaded first; the least loaded is among those tried, since if that one can't, few can
local function fullest(P, t)
  local order, emptiest = {}, nil
  for slot = 1, #P.room do
    if usable(P, slot) then
      local i = #order + 1
      while i > 1 and P.room[order[i - 1]] < P.room[slot] do i = i - 1 end
      for k = min(#order, TRIES - 2), i, -1 do order[k + 1] = order[k] end
      if i < TRIES then order[i] = slot end
      if not emptiest or P.room[slot] < P.room[emptiest] then emptiest = slot end
    end
  end
  for _, slot in ipairs(order) do
    if fits(backend(P, slot), t) then return slot end
    if slot == emptiest then emptiest = nil end
  end
  return emptiest and fits(backend(P, emptiest), t) and emptiest or nil
end

local function find(P, t)
  if P.left <= 0 then return nil end
  if t[BACKENDS] then return first_wanted(P, t) end
  if P.open > 2 then return fullest(P, t) end
  return soonest(P, t)
end

-- may this ticket start at all, now or later?
local function possible(P, t)
  if P.open == 0 then return false end
  local wanted = t[BACKENDS]
  if not wanted then return true end
  local slots = names(P)
  for i = 1, #wanted do
    local b = slots[wanted[i]] and backend(P, slots[wanted[i]])
    if b and b[B_OPEN] == 1 then return true end
  end
  return false
end

-- calls `what(b, t)` for the open backends that a ticket may have, a few at most -> whether it held for one; nil: there was none
local function any_backend(P, t, what)
  local wanted, tries, slots, held = t[BACKENDS], TRIES, nil, nil
  if wanted then slots = names(P) end
  for i = 1, wanted and #wanted or #P.room do
    local slot = i
    if wanted then slot = slots[wanted[i]] end
    local b = slot and backend(P, slot)
    if b and b[B_OPEN] == 1 then
      if tries == 0 then return true end
      tries = tries - 1
      if what(b, t) then return true end
      held = false
    end
  end
  return held
end

-- could an empty backend make its deadlines?
local function idle_can(b, t)
  local first = b[B_SAFETY] / 1000 * prefill_ms(b, t[UNCACHED], 0, 0)
  if now + first > t[DEADLINE] then return false end
  if not timed(b) then return true end
  local each = lean_us(b, 1, t[PROMPT]) / 1000
  return (t[TPOT] == 0 or each <= t[TPOT]) and (t[TOTAL] == 0 or now + first + t[HIGH] * each <= t[TOTAL])
end

local function makeable(P, t)
  local b = not t[BACKENDS] and P.fastest > 0 and backend(P, P.fastest)
  if b then return idle_can(b, t) end
  return any_backend(P, t, idle_can) ~= false
end

-- too late for every backend, room or not: waiting longer would only keep others
local function late(P, t) return any_backend(P, t, on_time) == false end
