-- order v1: who is next. By class rank, then by tenant, then by ticket key
-- (w:<rank>:<pool> holds the tenants with something waiting, scored by the key of their first ticket, which makes the
--  order within a class that of arrival; q:<rank>:<length of pool>:<pool>:<tenant> holds their tickets by key)
-- A member is <process>:<number>|<prompt tokens>: work ahead can be summed without touching a ticket.
local KEY_STEP = 1000 -- key units per logical millisecond
local RETRY_AHEAD = 1e15 -- a ticket that held a lease before goes ahead of its class

local function line_key(P, rank, tenant) return prefix .. 'q:' .. rank .. ':' .. #P.name .. ':' .. P.name .. ':' .. tenant end
local function tenants_key(P, rank) return prefix .. 'w:' .. rank .. ':' .. P.name end
local function member(process, number, t) return process .. ':' .. number .. '|' .. t[PROMPT] end

-- strictly growing within a pool, so that equal milliseconds keep their order; one that comes again after a loss gets the
-- time it came first, and its number for those of the same millisecond
local function arrival_key(P, age_ms, number)
  if age_ms > 0 then return (now - age_ms) * KEY_STEP + number % KEY_STEP end
  P.last_key = max(now * KEY_STEP, P.last_key + 1)
  return P.last_key
end

local function count(P, rank, n)
  P.waiting = P.waiting + n
  P.ranks[rank + 1] = P.ranks[rank + 1] + n
  P.dirty = true
end

local function enlist(P, process, number, t)
  call('ZADD', line_key(P, t[RANK], t[TENANT]), t[KEY], member(process, number, t))
  call('ZADD', tenants_key(P, t[RANK]), 'LT', t[KEY], t[TENANT])
  count(P, t[RANK], 1)
  P.blocked = 0
  t[STATE] = WAITING
  keep(process, number, t)
end

-- take one member out and give its tenant the key of what is then first
local function unlist(P, rank, tenant, who)
  local line = line_key(P, rank, tenant)
  if call('ZREM', line, who) == 1 then count(P, rank, -1) end
  local first = call('ZRANGE', line, 0, 0, 'WITHSCORES')
  if first[2] then call('ZADD', tenants_key(P, rank), first[2], tenant)
  else call('ZREM', tenants_key(P, rank), tenant) end
end

local function somebody_ahead(P, rank)
  for i = 1, rank + 1 do if P.ranks[i] > 0 then return true end end
  return false
end
