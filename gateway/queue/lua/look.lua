-- look v1: what waits and what is taken, for metrics and people; writes nothing
-- (a few microseconds per pool, class and backend, whatever the length of the queue)
-- KEYS prefix                   `{namespace}:`, the hash tag of all keys
-- ARGV ranks:msgpack pools:msgpack
-- -> msgpack {processes, {{pool, {{rank, waiting, tokens, tenants, spread, level}, ...}, {backend, ...}}, ...}}; a backend is {name,
-- open, leases, limit, prefill, prefill limit, kv, kv limit}. `tenants` are those in the order, below their caps; `spread` is
-- how far apart their virtual counters are, `level` how many of 1,000 arrivals may not wait. A pool that the store does not know is left out.
local prefix, unpack_msg = KEYS[1], cmsgpack.unpack

local function score(key, at)
  local pair = redis.call('ZRANGE', key, at, at, 'WITHSCORES')
  return pair[2] and tonumber(pair[2]) or 0
end

local function class_of(classes, rank, name)
  local C, key = classes[rank + 1], prefix .. 'w:' .. rank .. ':' .. name
  local level = 0
  for i = 1, rank + 1 do
    local better = classes[i]
    if better and better ~= 0 then level = math.max(level, better[C_WAITS][W_LEVEL]) end
  end
  if C == nil or C == 0 then return {rank, 0, 0, 0, 0, level} end
  local spread = math.floor(score(key, -1) - score(key, 0))
  return {rank, C[C_WAITING], C[C_TOKENS], redis.call('ZCARD', key), spread, level}
end

local function backend_of(b)
  return {b[B_NAME], b[B_OPEN], b[B_RUNNING], b[B_LIMIT], b[B_PREFILL], WINDOW * b[B_CHUNK], b[B_KV], b[B_KV_LIMIT]}
end

local function pool_of(name, ranks)
  local fields, classes, backends = redis.call('HGETALL', prefix .. 'o:' .. name), nil, {}
  for i = 1, #fields, 2 do
    if fields[i] == 'pool' then classes = unpack_msg(fields[i + 1])[10]
    elseif string.find(fields[i], '^b%d+$') then backends[#backends + 1] = backend_of(unpack_msg(fields[i + 1])) end
  end
  if not classes then return nil end
  local list = {}
  for i, rank in ipairs(ranks) do list[i] = class_of(classes, rank, name) end
  return {name, list, backends}
end

local ranks, pools = unpack_msg(ARGV[1]), {}
for _, name in ipairs(unpack_msg(ARGV[2])) do pools[#pools + 1] = pool_of(name, ranks) end
return cmsgpack.pack({redis.call('ZCARD', prefix .. 'procs'), pools})
