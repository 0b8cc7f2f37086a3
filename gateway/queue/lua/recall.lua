-- recall v1: a request that comes again under its key has the deadlines it had first, whichever process it comes to
-- (k:<tenant> holds the first-token deadline by identity, from when the queue takes the request in or has no room or time for
--  it, until it is answered in full, or FORGET_MS after the deadline. Of a tenant's at most KEPT: what is due first goes first)
local KEPT, FORGET_MS = 4096, 60000

local function recalled_key(name) return prefix .. 'k:' .. name end

-- takes the time off that has passed since the first time -> milliseconds
local function recall(t)
  if not t[IDENTITY] then return 0 end
  local first = tonumber(call('ZSCORE', recalled_key(t[TENANT]), t[IDENTITY]))
  if not first or now > first + FORGET_MS then return 0 end
  local passed = max(0, t[DEADLINE] - first)
  t[DEADLINE] = t[DEADLINE] - passed
  if t[TOTAL] > 0 then t[TOTAL] = max(1, t[TOTAL] - passed) end
  return passed
end

local function remember(t)
  if not t[IDENTITY] then return end
  local key, left = recalled_key(t[TENANT]), t[DEADLINE] - now + FORGET_MS
  call('ZADD', key, t[DEADLINE], t[IDENTITY])
  call('ZREMRANGEBYSCORE', key, '-inf', now - FORGET_MS)
  if call('ZCARD', key) > KEPT then call('ZPOPMIN', key) end
  if call('PTTL', key) < left then call('PEXPIRE', key, left) end
end

local function forget(t)
  if t[IDENTITY] then call('ZREM', recalled_key(t[TENANT]), t[IDENTITY]) end
end
