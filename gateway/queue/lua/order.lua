-- order v2: who is next. By class rank, then the tenant with the smallest virtual counter, then its tickets by key
-- (w:<rank>:<pool> holds the tenants with something waiting that are not at their cap, by counter;
--  q:<rank>:<length of pool>:<pool>:<tenant> holds their tickets by key)
-- A member is <process>:<number>|<uncached tokens>: work ahead can be summed without touching a ticket.
local KEY_STEP = 1000 -- key units per logical millisecond
local RETRY_AHEAD = 1e15 -- a ticket that held a lease before goes ahead of its tenant's line
local NO_POOL = -1 -- in place of PASSED: a lease told when its pool was not known
local WEIGHTS = 1e6 -- a weight of 1 at a price of 1

local function line_key(P, rank, tenant) return prefix .. 'q:' .. rank .. ':' .. #P.name .. ':' .. P.name .. ':' .. tenant end
local function tenants_key(P, rank) return prefix .. 'w:' .. rank .. ':' .. P.name end
local function member(process, number, t) return process .. ':' .. number .. '|' .. t[UNCACHED] end
local function weight_of(t) return max(1, floor(WEIGHTS / t[PREFILL_PRICE])) end

-- strictly growing within a pool, so that equal milliseconds keep their order; one that comes again after a loss gets the
-- time it came first, and its number for those of the same millisecond
local function arrival_key(P, age_ms, number)
  if age_ms > 0 then return (now - age_ms) * KEY_STEP + number % KEY_STEP end
  P.last_key = max(now * KEY_STEP, P.last_key + 1)
  P.dirty = true
  return P.last_key
end

-- `place`: 0 for the order of arrival, else milliseconds after the arrival and one
local function key_of(P, number, place, age_ms, retry)
  local key
  if place == 0 then key = arrival_key(P, age_ms, number)
  else key = (now - age_ms + place - 1) * KEY_STEP + number % KEY_STEP end
  return retry and key - RETRY_AHEAD or key
end

local function enlist(P, process, number, t)
  local rank, name = t[RANK], t[TENANT]
  call('ZADD', line_key(P, rank, name), t[KEY], member(process, number, t))
  local C, A = weigh(P, rank, name, 1, t[UNCACHED], weight_of(t))
  if C[C_WAITING] == 1 then C[C_DEBT] = min(C[C_DEBT], -WHOLE * (t[UNCACHED] + t[OUTPUT])) end -- it is owed its first, too
  local T = tenant(name)
  if T then T.queued = T.queued + 1; T.dirty = true; t[FLIGHT] = 0 end
  if A[A_PARKED] == 1 then
    if T.flight == 0 or T.flight + t[PROMPT] + t[OUTPUT] <= T.most_flight then unpark(T) end
  elseif A[A_WAITING] == 1 then
    lift(C, A)
    call('ZADD', tenants_key(P, rank), A[A_COUNTER], name)
  end
  t[STATE] = WAITING
  keep(process, number, t)
end

-- take one member out; `t` its ticket, if there is one
local function unlist(P, rank, name, who, t)
  if call('ZREM', line_key(P, rank, name), who) == 0 then return end
  local _, A = weigh(P, rank, name, -1, -tonumber(who:match('|(%d+)$')))
  if A[A_WAITING] == 0 then call('ZREM', tenants_key(P, rank), name) end
  local T = t and t[FLIGHT] >= 0 and tenant(name)
  if T then T.queued = T.queued - 1; T.dirty = true end
  if A[A_PARKED] == 1 then unpark(tenant(name)) end
  P.blocked = 0
end

local function somebody_ahead(P, rank)
  for i = 1, rank + 1 do
    local C = P.classes[i]
    if C ~= 0 and C[C_WAITING] > 0 then return true end
  end
  return false
end

-- a ticket out of all ledgers, whatever became of it
local function remove(process, number, t)
  local P = pool(t[POOL])
  if t[STATE] == HELD then
    if P then
      give_back(P, t)
      if t[PASSED] ~= NO_POOL then leases(P, t, -1) end
    end
    fly(t, 0)
  elseif P then
    unlist(P, t[RANK], t[TENANT], member(process, number, t), t)
  end
  drop(process, number)
end
