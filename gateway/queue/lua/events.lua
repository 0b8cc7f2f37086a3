-- events v3: what a process may say in a turn. Each is checked whole before it touches anything
-- event submit = 1: number:int tenant:str rank:int pool:str prompt:int output:int waits_ms:int total_ms:int tpot_ms:int backends:names standing:int age_ms:int uncached:int variance:int high:int place:int prefill_price:price output_price:price billed:int identity:text target:int
-- event first = 2: number:int
-- event progress = 3: number:int kv:int spread:int
-- event finish = 4: number:int output:int ran:int
-- event held = 5: number:int tenant:str rank:int pool:str prompt:int output:int tpot_ms:int backend:str prefill:int kv:int uncached:int spread:int prefill_price:price output_price:price
-- event pool = 6: pool:str max_queued:int backends:shares
-- event hello = 7: former:text
-- event bye = 8:
-- event beat = 9:
-- event tenant = 10: tenant:str requests_per_min:int tokens_per_min:int tokens_in_flight:int max_queued:int
-- share: name:str max_running:int prefill_tokens_per_s:int kv_tokens:int chunk_tokens:int open:int step_us:int prefill_ns:int running_us:int kv_ns:int safety_milli:int kv_deviations_milli:int
local SUBMIT, FIRST, PROGRESS, FINISH, LEASED, DECLARE, HELLO, BYE, BEAT, LIMITS = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local NEW, RETRY, AGAIN = 0, 1, 2 -- a submit's standing
local MOVED = -1e15 -- in place of a beat: older than any
local MAX_INT = 1e12 -- sums of a thousand such numbers are exact
local MAX_PRICE = 1e6
local SAMPLE = 1000 -- tokens of a prompt by which backends are compared

local top -- highest ticket number of this process
local leaving, beating

local function is_int(v) return type(v) == 'number' and v >= 0 and v <= MAX_INT and v == floor(v) end
local function is_price(v) return is_int(v) and v >= 1 and v <= MAX_PRICE end
local function is_str(v) return type(v) == 'string' and #v > 0 end
local function is_text(v) return type(v) == 'string' end
local function is_names(v)
  if v == false then return true end
  if type(v) ~= 'table' or #v == 0 then return false end
  for i = 1, #v do if not is_str(v[i]) then return false end end
  return true
end

-- where the list of fields begins in `list`, and the checks they must pass
local function shaped(list, from, shape)
  for i = 1, #shape do
    if not shape[i](list[from + i]) then return i end
  end
  return nil
end

local SHARE --@share
local function is_shares(v)
  if type(v) ~= 'table' then return false end
  for i = 1, #v do
    if type(v[i]) ~= 'table' or shaped(v[i], 0, SHARE) then return false end
  end
  return true
end
local SHAPES --@shapes (both filled in from the header above when the library is put together)

local on = {}

-- numbers grow, but for those that are declared again
local function fresh(number)
  if number <= top and ticket(me, tostring(number)) then error('ticket ' .. number .. ' is there already', 0) end
  top = max(top, number)
end

-- -> word, ms, milliseconds: why a ticket may not even wait
local function unwanted(P, t, T)
  if P.waiting >= P.max_queued then return 'queue_full', back_ms(P, t, drain_ms(P, t, 0, P.waiting / 2)) end
  if T and T.most_queued > 0 and T.queued >= T.most_queued then
    local A = account(P, t[RANK], t[TENANT])
    return 'queue_full', back_ms(P, t, drain_ms(P, t, A[A_TOKENS], A[A_WAITING]))
  end
  local ms = admit(P, t)
  if ms then return 'deadline_unreachable', back_ms(P, t, ms) end
  ms = shed(P, t)
  return ms and 'overloaded', ms
end

-- -> word, milliseconds: why a ticket is not taken, whatever waits. Reserves what it will use
local function unfit(P, t, T, standing, billed)
  if now >= t[DEADLINE] then return 'expired' end
  if standing == NEW and not makeable(P, t) then return 'deadline_impossible' end
  if not T then return nil end
  if standing == NEW and billed then
    local ms = over_quota(T, t)
    if ms > 0 then return 'rate_limited', ms end
  end
  if standing == AGAIN then t[BILL] = OWED else reserve(T, t) end
end

local function submitted(e)
  local waits, total, backends, uncached = e[8], e[9], e[11], min(e[14], e[6])
  return {WAITING, e[3], e[4], e[5], e[6], e[7], 0, now + waits, backends, e[10], total > 0 and now + total or 0, 0, 0, 0,
          uncached, e[15], max(e[16], e[7]), e[18], e[19], 0, -1, 0, 0, now - e[13], e[21] ~= '' and e[21], e[22]}
end

on[SUBMIT] = function(e)
  local number, rank, standing = tostring(e[2]), e[4], e[12]
  if rank >= RANKS then error('rank ' .. rank .. ' is out of range', 0) end
  fresh(e[2])
  local P, t, T = pool(e[5]), submitted(e), tenant(e[3])
  if not P or not possible(P, t) then return tell(me, number, REFUSE, 'no_backend', 1000) end
  local passed = recall(t)
  if passed > 0 then
    tell(me, number, NEARER, '', passed)
    if t[TARGET] > 0 then t[TARGET] = max(1, t[TARGET] - passed) end
  end
  local word, ms = unfit(P, t, T, standing, e[20] > 0)
  if word then return tell(me, number, REFUSE, word, ms, quota_of(t)) end
  remember(t)
  if not somebody_ahead(P, rank) and not capped(T, t) then
    local slot = find(P, t)
    if slot then
      if T then t[FLIGHT] = 0 end
      lift(class(P, rank), account(P, rank, t[TENANT]))
      return grant(P, me, number, t, slot)
    end
  end
  t[KEY] = key_of(P, e[2], e[17] > 0 and max(1, e[17] - passed) or 0, e[13], standing == RETRY)
  if standing == NEW then
    word, ms = unwanted(P, t, T)
    if word then
      refund(t)
      return tell(me, number, REFUSE, word, ms, quota_of(t))
    end
  end
  enlist(P, me, number, t)
  if P.blocked == 1 and find(P, t) then P.blocked = 0 end
end

on[FIRST] = function(e)
  local number = tostring(e[2])
  local t = ticket(me, number)
  if t and t[STATE] == HELD and t[PREFILL] > 0 then
    adjust(pool(t[POOL]), t, 0, t[KV], t[SPREAD])
    keep(me, number, t)
  end
end

on[PROGRESS] = function(e)
  local number = tostring(e[2])
  local t = ticket(me, number)
  if t and t[STATE] == HELD and (t[KV] ~= e[3] or t[SPREAD] ~= e[4]) then
    adjust(pool(t[POOL]), t, t[PREFILL], e[3], e[4])
    fly(t, e[3])
    keep(me, number, t)
  end
end

-- the end of a ticket from any state, by its owner; of one that is not there: nothing. `ran` 2 is an answer in full
on[FINISH] = function(e)
  local number, output = tostring(e[2]), e[3]
  local t = ticket(me, number)
  if not t then return end
  local P, ran = pool(t[POOL]), e[4] > 0 or e[3] > 0
  if e[4] == 2 then forget(t) end
  if t[STATE] == HELD then
    remove(me, number, t)
    if P then settle(P, t, output, ran) end
    local T = tenant(t[TENANT])
    if T then correct(T, t, ran and 1 or 0, ran and t[PROMPT] + output or 0) end
  else
    if P then departed(P, t, true) end
    remove(me, number, t)
    refund(t)
  end
end

-- a lease that runs already, told again after a loss. A backend nobody declares any more has no ledger
on[LEASED] = function(e)
  local number = tostring(e[2])
  if e[4] >= RANKS then error('rank ' .. e[4] .. ' is out of range', 0) end
  fresh(e[2])
  local P, T = pool(e[5]), tenant(e[3])
  local t = {HELD, e[3], e[4], e[5], e[6], e[7], 0, 0, false, e[8], 0, 0, e[10], e[11],
             min(e[12], e[6]), e[13], 0, e[14], e[15], e[13], T and 0 or -1, OWED, P and 0 or NO_POOL, now, false, 0}
  local slot = P and names(P)[e[9]]
  if slot then take(P, slot, t, e[10], e[11], e[13]) end
  if P then leases(P, t, 1) end
  fly(t, e[11])
  keep(me, number, t)
end

-- the last declaration of a tenant holds; what it uses stays
on[LIMITS] = function(e)
  local T = tenant(e[2])
  if not T then
    if e[3] + e[4] + e[5] + e[6] == 0 then return end
    T = new_tenant(e[2])
  end
  T.requests, T.tokens, T.most_flight, T.most_queued, T.dirty = e[3], e[4], e[5], e[6], true
  unpark(T)
end

local function vacant(P)
  local used, slot = {}, 1
  for _, s in pairs(names(P)) do used[s] = true end
  while used[slot] do slot = slot + 1 end
  return slot
end

-- the last declaration of a pool holds; ledgers stay with the backend's name
on[DECLARE] = function(e)
  local P = pool(e[2]) or new_pool(e[2])
  local slots, declared = names(P), {}
  for _, share in ipairs(e[4]) do
    local name = share[1]
    local slot = slots[name]
    if not slot then slot = vacant(P); slots[name] = slot; P.renamed = true end
    local b = touch(P, slot) or {name, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {}}
    b[B_OPEN], b[B_LIMIT], b[B_RATE], b[B_KV_LIMIT], b[B_CHUNK] = min(share[6], 1), share[2], share[3], share[4], share[5]
    for i = 7, 12 do b[B_STEP_US + i - 7] = share[i] end
    P.backends[slot] = b
    declared[name] = true
    recount(P, slot, b)
  end
  local removed = {}
  for name, slot in pairs(slots) do if not declared[name] then removed[#removed + 1] = slot end end
  for _, slot in ipairs(removed) do
    local b = touch(P, slot)
    b[B_OPEN] = -1
    if b[B_RUNNING] == 0 then retire(P, slot, b) else recount(P, slot, b) end
  end
  P.open, P.fastest = 0, 0
  local least = huge
  for _, share in ipairs(e[4]) do
    if share[6] > 0 then
      P.open = P.open + 1
      local slot = slots[share[1]]
      local ms = prefill_ms(backend(P, slot), SAMPLE, 0, 0)
      if ms < least then P.fastest, least = slot, ms end
    end
  end
  P.max_queued, P.blocked, P.dirty = e[3], 0, true
end

-- this process under its former name: bury that one. Its record goes first, so that it gets no grant any more
on[HELLO] = function(e)
  call('ZADD', prefix .. 'procs', now, me)
  if e[2] ~= '' and e[2] ~= me then
    call('DEL', prefix .. 'p:' .. e[2])
    living[e[2]] = false
    call('ZADD', prefix .. 'procs', 'XX', MOVED, e[2])
    later(200)
  end
end

on[BYE] = function() leaving = true end

-- what waits is looked at even where nothing happens
on[BEAT] = function()
  beating = call('SMEMBERS', prefix .. 'pools')
  call('ZADD', prefix .. 'procs', now, me)
  for i = 1, min(#beating, MAX_POOLS) do
    local P = pool(beating[i])
    if P then level_of(P, RANKS - 1) end
  end
end

local function act(e)
  local shape = type(e) == 'table' and SHAPES[e[1]]
  if not shape then error('no such event', 0) end
  local wrong = shaped(e, 1, shape)
  if wrong then error('field ' .. wrong .. ' of event ' .. e[1] .. ' is not of its type', 0) end
  on[e[1]](e)
end

-- one bad event must not poison its turn, whose retry would fail for ever
local function apply(batch)
  for _, e in ipairs(batch) do
    local ok, why = pcall(act, e)
    if not ok then tell(me, type(e) == 'table' and is_int(e[2]) and e[2] or 0, ERROR, tostring(why)) end
  end
end
