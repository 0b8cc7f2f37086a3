-- events v1: what a process may say in a turn. Each is checked whole before it touches anything
-- event submit = 1: number:int tenant:str rank:int pool:str prompt:int output:int waits_ms:int total_ms:int tpot_ms:int backends:names standing:int age_ms:int
-- event first = 2: number:int
-- event progress = 3: number:int kv:int
-- event finish = 4: number:int output:int ran:int
-- event held = 5: number:int tenant:str rank:int pool:str prompt:int output:int tpot_ms:int backend:str prefill:int kv:int
-- event pool = 6: pool:str max_queued:int backends:shares
-- event hello = 7: former:text
-- event bye = 8:
-- event beat = 9:
-- share: name:str max_running:int prefill_tokens_per_s:int kv_tokens:int chunk_tokens:int open:int
local SUBMIT, FIRST, PROGRESS, FINISH, LEASED, DECLARE, HELLO, BYE, BEAT = 1, 2, 3, 4, 5, 6, 7, 8, 9
local NEW, RETRY, AGAIN = 0, 1, 2 -- a submit's standing
local MOVED = -1e15 -- in place of a beat: older than any
local MAX_INT = 9007199254740991

local top -- highest ticket number of this process
local leaving, beating

local function is_int(v) return type(v) == 'number' and v >= 0 and v <= MAX_INT and v == floor(v) end
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

on[SUBMIT] = function(e)
  local number, rank, standing = tostring(e[2]), e[4], e[12]
  if rank >= RANKS then error('rank ' .. rank .. ' is out of range', 0) end
  fresh(e[2])
  local P = pool(e[5])
  local t = {WAITING, e[3], rank, e[5], e[6], e[7], 0, now + e[8], e[11], e[10], e[9], 0, 0, 0}
  if not P or not possible(P, t) then return tell(me, number, REFUSE, 'no_backend', 1000) end
  if e[8] == 0 then return tell(me, number, REFUSE, 'expired') end
  if not somebody_ahead(P, rank) then
    local slot = find(P, t)
    if slot then return grant(P, me, number, t, slot) end
  end
  if standing == NEW and P.waiting >= P.max_queued then return tell(me, number, REFUSE, 'queue_full', 1000) end
  t[KEY] = arrival_key(P, e[13], e[2])
  if standing == RETRY then t[KEY] = t[KEY] - RETRY_AHEAD end
  enlist(P, me, number, t)
end

on[FIRST] = function(e)
  local number = tostring(e[2])
  local t = ticket(me, number)
  if t and t[STATE] == HELD and t[PREFILL] > 0 then
    adjust(pool(t[POOL]), t, 0, t[KV])
    keep(me, number, t)
  end
end

on[PROGRESS] = function(e)
  local number = tostring(e[2])
  local t = ticket(me, number)
  if t and t[STATE] == HELD and t[KV] ~= e[3] then
    adjust(pool(t[POOL]), t, t[PREFILL], e[3])
    keep(me, number, t)
  end
end

-- the end of a ticket from any state; of one that is not there: nothing
local function remove(process, number, t)
  local P = pool(t[POOL])
  if P then
    if t[STATE] == HELD then give_back(P, t) else unlist(P, t[RANK], t[TENANT], member(process, number, t)) end
  end
  drop(process, number)
end

on[FINISH] = function(e)
  local number = tostring(e[2])
  local t = ticket(me, number)
  if t then remove(me, number, t) end
end

-- a lease that runs already, told again after a loss. A backend nobody declares any more has no ledger
on[LEASED] = function(e)
  local number = tostring(e[2])
  if e[4] >= RANKS then error('rank ' .. e[4] .. ' is out of range', 0) end
  fresh(e[2])
  local P = pool(e[5])
  local t = {HELD, e[3], e[4], e[5], e[6], e[7], 0, 0, false, e[8], 0, 0, e[10], e[11]}
  local slot = P and names(P)[e[9]]
  if slot then take(P, slot, t, e[10], e[11]) end
  keep(me, number, t)
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
    local b = backend(P, slot) or {name, 0, 0, 0, 0, 0, 0, 0, 0}
    b[B_OPEN], b[B_LIMIT], b[B_RATE], b[B_KV_LIMIT], b[B_CHUNK] = min(share[6], 1), share[2], share[3], share[4], share[5]
    P.backends[slot] = b
    declared[name] = true
    for s = #P.free + 1, slot - 1 do P.free[s] = 0 end
    settle(P, slot, b)
  end
  local removed = {}
  for name, slot in pairs(slots) do if not declared[name] then removed[#removed + 1] = slot end end
  for _, slot in ipairs(removed) do
    local b = backend(P, slot)
    b[B_OPEN] = -1
    if b[B_RUNNING] == 0 then retire(P, slot, b) else settle(P, slot, b) end
  end
  P.open = 0
  for _, share in ipairs(e[4]) do if share[6] > 0 then P.open = P.open + 1 end end
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

on[BEAT] = function()
  beating = true
  call('ZADD', prefix .. 'procs', now, me)
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
