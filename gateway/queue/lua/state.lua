-- state v3: what one turn has read and will write back
-- (all reads go through these caches and all writes but those of the sorted sets wait for `flush`, so that an error leaves
--  the store as it was; nothing here survives a turn: `begin` resets it)
-- While a Function library loads no global exists but its registration: `begin` binds what is needed at each call.
local SCHEMA = 3 -- a change of meaning of any key is another number: two schemas never share a namespace

local call, pack, unpack_msg, unpack_list, floor, ceil, max, min, sort, sqrt, huge, frexp
local prefix, me, now -- key prefix; this turn's process; logical milliseconds
local outcomes, mail -- for this process; for others, by process
local tickets, changed, dropped -- each by process, then by ticket number as a string
local pools, tenants, living
local due_ms -- when another turn is worth its cost without an event; 0 is never

-- outcomes: {ticket number, code, word, milliseconds, what is left of the tenant's quota}
local GRANT, REFUSE, ERROR, NEARER = 1, 2, 3, 4

-- a ticket, packed in the hash of its owner; `KEY` is its place in its tenant's line, `DEADLINE` and `TOTAL` are logical
-- milliseconds (`TOTAL` 0: none). SLOT, PREFILL, KV, SPREAD: what it has taken of a backend. FLIGHT: of its tenant (-1: the
-- tenant has no record). BILL: the slot of the quota window in which it was reserved, 0: in none. PASSED: how often others
-- went by. SINCE: when it came. IDENTITY: under which it keeps its first deadlines, or false. TARGET: how many
-- milliseconds it may wait before it counts as late, 0: any
local STATE, TENANT, RANK, POOL, PROMPT, OUTPUT, KEY, DEADLINE = 1, 2, 3, 4, 5, 6, 7, 8
local BACKENDS, TPOT, TOTAL, SLOT, PREFILL, KV = 9, 10, 11, 12, 13, 14
local UNCACHED, VARIANCE, HIGH, PREFILL_PRICE, OUTPUT_PRICE = 15, 16, 17, 18, 19
local SPREAD, FLIGHT, BILL, PASSED, SINCE, IDENTITY, TARGET = 20, 21, 22, 23, 24, 25, 26
local WAITING, HELD = 1, 2

-- a backend, one field of its pool: six declared values, six ledgers, six declared values
local B_NAME, B_OPEN, B_LIMIT, B_RATE, B_KV_LIMIT, B_CHUNK, B_RUNNING, B_PREFILL, B_KV = 1, 2, 3, 4, 5, 6, 7, 8, 9
local B_SPREAD, B_PROMPTS, B_TPOTS = 10, 11, 12
local B_STEP_US, B_PREFILL_NS, B_RUNNING_US, B_KV_NS, B_SAFETY, B_DEVIATIONS = 13, 14, 15, 16, 17, 18

local RANKS = 10 -- service classes
local NEAR = 4 -- backends read together with their pool

local function begin(key, process)
  call, pack, unpack_msg, unpack_list = redis.call, cmsgpack.pack, cmsgpack.unpack, unpack
  floor, ceil, max, min, sort, sqrt = math.floor, math.ceil, math.max, math.min, table.sort, math.sqrt
  huge, frexp = math.huge, math.frexp
  prefix, me, now, due_ms = key, process, 0, 0
  outcomes, mail, tickets, changed, dropped, pools, tenants, living = {}, {}, {}, {}, {}, {}, {}, {}
  living[process] = true
end

local function later(ms) if due_ms == 0 or ms < due_ms then due_ms = ms end end

local function tell(process, number, code, word, ms, quota)
  local list = outcomes
  if process ~= me then
    list = mail[process]
    if not list then list = {}; mail[process] = list end
  end
  list[#list + 1] = {tonumber(number), code, word, ms or 0, quota}
end

-- a process without its record is dead, moved or gone: it gets no grant and no mail
local function alive(process)
  local v = living[process]
  if v == nil then v = call('EXISTS', prefix .. 'p:' .. process) == 1; living[process] = v end
  return v
end

local function tickets_of(process)
  local t = tickets[process]
  if not t then t = {}; tickets[process] = t; changed[process] = {}; dropped[process] = {} end
  return t
end

local function ticket(process, number)
  local all = tickets_of(process)
  local t = all[number]
  if t == nil then
    local raw = call('HGET', prefix .. 'p:' .. process .. ':l', number)
    t = raw and unpack_msg(raw) or false
    all[number] = t
  end
  return t
end

local function keep(process, number, t)
  tickets_of(process)[number] = t; changed[process][number] = t; dropped[process][number] = nil
end

local function drop(process, number)
  tickets_of(process)[number] = false; changed[process][number] = nil; dropped[process][number] = true
end

-- a pool: its record and, by slot, its backends as far as they were needed. `room` by slot: 0 where nothing may start, else
-- 1 and the load in thousandths; `left` counts those that are not 0. `classes` by rank + 1, 0 for one never used
local function pool(name)
  local P = pools[name]
  if P ~= nil then return P end
  local key = prefix .. 'o:' .. name
  local raw = call('HMGET', key, 'pool', 'b1', 'b2', 'b3', 'b4')
  P = false
  if raw[1] then
    local r = unpack_msg(raw[1])
    P = {name = name, key = key, blocked = r[1], last_key = r[2], max_queued = r[3], waiting = r[4], open = r[5], left = r[6],
         fastest = r[7], sums = r[8], room = r[9], classes = r[10], tested = r[11], backends = {}, counted = {}, stale = {},
         touched = {}, accounts = {}, moved = {}, dirty = false}
    for slot = 1, NEAR do P.backends[slot] = raw[slot + 1] and unpack_msg(raw[slot + 1]) or false end
  end
  pools[name] = P
  return P
end

local function new_pool(name)
  local P = {name = name, key = prefix .. 'o:' .. name, blocked = 0, last_key = 0, max_queued = 0, waiting = 0, open = 0,
             left = 0, fastest = 0, sums = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, room = {}, classes = {}, tested = 0,
             backends = {}, counted = {}, stale = {}, touched = {}, accounts = {}, moved = {}, names = {}, dirty = true}
  for i = 1, RANKS do P.classes[i] = 0 end
  for slot = 1, NEAR do P.backends[slot] = false end
  call('SADD', prefix .. 'pools', name)
  pools[name] = P
  return P
end

local function backend(P, slot)
  local b = P.backends[slot]
  if b == nil then
    local raw = call('HGET', P.key, 'b' .. slot)
    b = raw and unpack_msg(raw) or false
    P.backends[slot] = b
  end
  return b
end

-- slot by backend name; read only where a ticket or a declaration speaks of backends by name
local function names(P)
  if not P.names then
    local raw = call('HGET', P.key, 'names')
    P.names = raw and unpack_msg(raw) or {}
  end
  return P.names
end

local function flush_tickets()
  for process, list in pairs(changed) do
    local args, n = {}, 0
    for number, t in pairs(list) do args[n + 1] = number; args[n + 2] = pack(t); n = n + 2 end
    if n > 0 then call('HSET', prefix .. 'p:' .. process .. ':l', unpack_list(args)) end
  end
  for process, list in pairs(dropped) do
    local args, n = {}, 0
    for number in pairs(list) do n = n + 1; args[n] = number end
    if n > 0 then call('HDEL', prefix .. 'p:' .. process .. ':l', unpack_list(args)) end
  end
end

local function flush_mail()
  for process, list in pairs(mail) do
    if alive(process) then call('XADD', prefix .. 'p:' .. process .. ':m', '*', 'o', pack(list)) end
  end
end
