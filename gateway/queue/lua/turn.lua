-- turn v3: one exchange between a process and the queue: apply its events once, reap, dispatch, answer
-- KEYS prefix                   `{namespace}:`, the hash tag of all keys
-- ARGV process:str number:int cursor:str batch:msgpack wall_ms:int
-- wall_ms is the server's clock when 0. -> msgpack {status, now, outcomes, due_ms, live, waiting, depths}; `live` is the number of
-- this process's tickets when it beat, else -1; `waiting` that of the pools touched, -1 when none was; `depths` what waits in
-- each pool, and what part of the arrivals may not, when it beat.
local MAX_STEP_MS, MAX_EVENTS, MAX_POOLS, SWEEP = 2000, 32, 64, 8

-- time never goes back and never far forward: a step of the server's clock neither kills an owner nor expires a deadline
local function tick(meta, wall_ms)
  if wall_ms == 0 then
    local t = call('TIME')
    wall_ms = t[1] * 1000 + floor(t[2] / 1000)
  end
  now = tonumber(meta[2]) or 0
  if meta[3] then now = now + max(0, min(wall_ms - tonumber(meta[3]), MAX_STEP_MS)) end
  return wall_ms
end

-- -> the answer to a turn that must not be applied
local function answered(record, number)
  local last = tonumber(record[1])
  if number == 1 and not last then return nil end
  if not last then return pack({'unknown', now}) end
  if number == last then return record[2] end
  if number == last + 1 then return nil end
  return pack({number < last and 'stale' or 'gap', now})
end

local function some(list, seen, what) if not seen[what] then seen[what] = true; list[#list + 1] = what end end

-- all of this process's tickets that the batch names, in one call
local function fetch_tickets(batch)
  local numbers, seen, all = {}, {}, tickets_of(me)
  for _, e in ipairs(batch) do
    if type(e) == 'table' and is_int(e[2]) and (e[1] == FIRST or e[1] == PROGRESS or e[1] == FINISH) then
      some(numbers, seen, tostring(e[2]))
    end
  end
  if #numbers == 0 then return end
  local raw = call('HMGET', prefix .. 'p:' .. me .. ':l', unpack_list(numbers))
  for i, number in ipairs(numbers) do all[number] = raw[i] and unpack_msg(raw[i]) or false end
end

-- and the accounts and tenants that will be needed
local function fetch(batch)
  fetch_tickets(batch)
  local ids, owners, seen = {}, {}, {}
  local function wants(P, rank, name)
    some(owners, seen, name)
    if P then
      local list = ids[P]
      if not list then list = {{}, {}}; ids[P] = list end
      some(list[1], list[2], rank .. ':' .. name)
    end
  end
  for _, e in ipairs(batch) do
    local t = type(e) == 'table' and e[1] == FINISH and is_int(e[2]) and tickets_of(me)[tostring(e[2])]
    if t then wants(pool(t[POOL]), t[RANK], t[TENANT])
    elseif type(e) == 'table' and e[1] == SUBMIT and is_str(e[3]) and is_int(e[4]) and is_str(e[5]) then
      wants(pool(e[5]), e[4], e[3])
    end
  end
  if #owners == 0 then return end
  local raw = call('HMGET', prefix .. 't', unpack_list(owners))
  for i, name in ipairs(owners) do read_tenant(name, raw[i]) end
  for P, list in pairs(ids) do
    raw = call('HMGET', prefix .. 'a:' .. P.name, unpack_list(list[1]))
    for i, id in ipairs(list[1]) do P.accounts[id] = raw[i] and unpack_msg(raw[i]) or {0, 0, 0, 0, 0, 0, 0, 0} end
  end
end

-- the last one puts the light out
local function leave(record_key)
  if call('HLEN', record_key .. ':l') > 0 then
    call('DEL', record_key)
    call('ZADD', prefix .. 'procs', 'XX', MOVED, me)
    return
  end
  call('DEL', record_key, record_key .. ':l', record_key .. ':m')
  call('ZREM', prefix .. 'procs', me)
  if call('ZCARD', prefix .. 'procs') > 0 then return end
  for _, name in ipairs(call('SMEMBERS', prefix .. 'pools')) do call('DEL', prefix .. 'o:' .. name, prefix .. 'a:' .. name) end
  call('DEL', prefix .. 'pools', prefix .. 'meta', prefix .. 't')
end

local function waiting_here()
  local n = -1
  for _, P in pairs(pools) do if P then n = max(n, 0) + P.waiting end end
  return n
end

-- how many wait in each pool, and the level at which it sheds, by rank: {pool, {n, ...}, {level, ...}}
local function depths()
  local list = {}
  for i = 1, min(#beating, MAX_POOLS) do
    local P, counts, levels = pool(beating[i]), {}, {}
    if P then
      for place, C in ipairs(P.classes) do
        counts[place] = C == 0 and 0 or C[C_WAITING]
        levels[place] = level_of(P, place - 1)
      end
      list[#list + 1] = {P.name, counts, levels}
    end
  end
  return list
end

local function answer(record_key, number, meta)
  local live, waiting, deep = -1, waiting_here(), {}
  if beating then
    live = call('HLEN', record_key .. ':l')
    deep = depths()
  end
  local reply = pack({'ok', now, outcomes, due_ms, live, waiting, deep})
  call('HSET', record_key, 'number', number, 'reply', reply, 'top', top)
  call('HSET', prefix .. 'meta', 'schema', SCHEMA, 'now', now, 'wall', meta.wall, 'reaped', meta.reaped,
       'unfinished', meta.unfinished)
  return reply
end

-- the pools that this turn touched, and those that a turn before left unfinished -> those that are not finished now
local function dispatch_all(before)
  if before and before ~= '' then
    for _, name in ipairs(unpack_msg(before)) do pool(name) end
  end
  local left = {}
  for name, P in pairs(pools) do
    if P then
      retest(P)
      if not dispatch(P) then left[#left + 1] = name end
    end
  end
  if #left == 0 then return '' end
  later(1)
  return pack(left)
end

local function turn(KEYS, ARGV)
  begin(KEYS[1], ARGV[1])
  local number, cursor, batch = tonumber(ARGV[2]), ARGV[3], unpack_msg(ARGV[4])
  if #batch > MAX_EVENTS then return redis.error_reply('ERR a turn holds at most ' .. MAX_EVENTS .. ' events') end
  local record_key = prefix .. 'p:' .. me
  local meta = call('HMGET', prefix .. 'meta', 'schema', 'now', 'wall', 'reaped', 'unfinished')
  if meta[1] and tonumber(meta[1]) ~= SCHEMA then return pack({'version_mismatch', tonumber(meta[1])}) end
  local wall_ms = tick(meta, tonumber(ARGV[5]))
  local record = call('HMGET', record_key, 'number', 'reply', 'top')
  local done = answered(record, number)
  if done then return done end

  top, leaving, beating = tonumber(record[3]) or 0, false, false
  fetch(batch)
  apply(batch)
  local reaped = reap(tonumber(meta[4]) or 0)
  local unfinished = dispatch_all(meta[5])

  flush_tickets()
  flush_accounts()
  flush_tenants()
  if reaped == now then
    for _, P in pairs(pools) do if P then sweep_accounts(P, SWEEP) end end
  end
  flush_pools()
  flush_mail()
  if cursor ~= '' then call('XTRIM', record_key .. ':m', 'MINID', cursor) end
  local reply = answer(record_key, number, {wall = wall_ms, reaped = reaped, unfinished = unfinished})
  if leaving then leave(record_key) end
  return reply
end
