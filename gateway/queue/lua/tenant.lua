-- tenant v2: what a tenant may use over all pools and processes: requests and tokens a minute, tokens in flight, places
-- (only tenants with limits have a record. A minute is a window of SLOTS slots, of which the oldest counts whole: whatever the
--  moment, the last 60 s never hold more than the limit. What waits is reserved; what was never dispatched returns)
local SLOTS, SLOT_MS, WINDOW_MS, SECOND_MS = 13, 5000, 68000, 1000
local FAR_MS, GRACE_MS, PROMISES = 600000, 1500, 256 -- the longest wait told; how long a promise holds; how many are kept
local OWED = -1 -- in place of a slot: reserved before a loss, where nobody knows

local function read_tenant(name, raw)
  if not raw then tenants[name] = false; return false end
  local r = unpack_msg(raw)
  local T = {name = name, requests = r[1], tokens = r[2], most_flight = r[3], most_queued = r[4], flight = r[5], queued = r[6],
             at = r[7], used = r[8], spent = r[9], promises = r[10], need = r[11], parked = r[12], dirty = false}
  tenants[name] = T
  return T
end

local function tenant(name)
  local T = tenants[name]
  if T == nil then T = read_tenant(name, call('HGET', prefix .. 't', name)) end
  return T
end

local function new_tenant(name)
  local T = {name = name, requests = 0, tokens = 0, most_flight = 0, most_queued = 0, flight = 0, queued = 0, at = 0, used = {},
             spent = {}, promises = {}, need = 0, parked = {}, dirty = true}
  tenants[name] = T
  return T
end

local function flush_tenants()
  local args, n = {}, 0
  for name, T in pairs(tenants) do
    if T and T.dirty then
      args[n + 1] = name
      args[n + 2] = pack({T.requests, T.tokens, T.most_flight, T.most_queued, T.flight, T.queued, T.at, T.used, T.spent,
                          T.promises, T.need, T.parked})
      n = n + 2
    end
  end
  if n > 0 then call('HSET', prefix .. 't', unpack_list(args)) end
end

-- the window --------------------------------------------------------------------------------------------------------------

local function limited(T) return T.requests > 0 or T.tokens > 0 end
local function place_of(slot) return slot % SLOTS + 1 end

-- forget what has left the window
local function roll(T)
  local slot = floor(now / SLOT_MS) + 1
  if #T.used < SLOTS then
    for i = 1, SLOTS do T.used[i] = 0; T.spent[i] = 0 end
    T.at = slot
  end
  if slot == T.at then return end
  for s = max(T.at + 1, slot - SLOTS + 1), slot do T.used[place_of(s)] = 0; T.spent[place_of(s)] = 0 end
  T.at = slot
  T.dirty = true
end

local function sum(list)
  local n = 0
  for i = 1, #list do n = n + list[i] end
  return n
end

-- milliseconds until `n` more fit into a list's window, 0 for now; never is a minute
local function until_fits(T, list, n, limit)
  local over = sum(list) + n - limit
  if limit == 0 or over <= 0 then return 0 end
  for s = T.at - SLOTS + 1, T.at do
    over = over - list[place_of(s)]
    if over <= 0 then return (s - 1 + SLOTS) * SLOT_MS - now end
  end
  return WINDOW_MS
end

-- what a ticket counts for in the window, until the truth is known: what nine in ten stay within
local function cost_of(t) return t[PROMPT] + max(t[OUTPUT], t[HIGH]) end

-- does this come in the time promised to one who was refused before? Then that promise, {time, requests, tokens}, is redeemed.
-- One that nobody redeems in time is void
local function redeem(T)
  local list, first = T.promises, 1
  while list[first] and list[first][1] + GRACE_MS < now do first = first + 1 end
  local due = list[first] and list[first][1] <= now
  local gone = due and first or first - 1
  if gone > 0 then
    for i = 1, #list do list[i] = list[i + gone] end
    T.dirty = true
  end
  return due
end

-- tell one who is refused when to come back: in whole seconds, one after the other at the pace of the limit
local function promise(T, wait, cost)
  local list = T.promises
  local each = max(T.requests > 0 and WINDOW_MS / T.requests or 0, T.tokens > 0 and WINDOW_MS * cost / T.tokens or 0)
  local at = max(now + wait, list[#list] and list[#list][1] + each or 0)
  local ms = min(SECOND_MS * ceil((at - now) / SECOND_MS), FAR_MS)
  if #list < PROMISES then
    local i = #list + 1
    while i > 1 and list[i - 1][1] > now + ms do list[i] = list[i - 1]; i = i - 1 end
    list[i] = {now + ms, 1, cost}
    T.dirty = true
  end
  return ms
end

-- would `n` more, now, take the room of those who were promised theirs? Each must still fit when its time comes
local function crowds(T, list, n, limit, part)
  if limit == 0 then return false end
  local held, i = sum(list) + n, 1
  for s = T.at - SLOTS + 1, T.at do
    while T.promises[i] and T.promises[i][1] < (s - 1 + SLOTS) * SLOT_MS do held = held + T.promises[i][part]; i = i + 1 end
    if held > limit then return true end
    held = held - list[place_of(s)]
  end
  return false
end

-- milliseconds until the tenant may ask for this, 0 for now
local function over_quota(T, t)
  if not limited(T) then return 0 end
  roll(T)
  local cost = cost_of(t)
  local wait = max(until_fits(T, T.used, 1, T.requests), until_fits(T, T.spent, cost, T.tokens))
  if #T.promises > 0 and not redeem(T) and wait == 0 then
    if crowds(T, T.used, 1, T.requests, 2) or crowds(T, T.spent, cost, T.tokens, 3) then wait = 1 end
  end
  return wait > 0 and promise(T, wait, cost) or 0
end

local function reserve(T, t)
  if not limited(T) then return end
  roll(T)
  local i = place_of(T.at)
  T.used[i] = T.used[i] + 1
  T.spent[i] = T.spent[i] + cost_of(t)
  T.dirty = true
  t[BILL] = T.at
end

-- the truth in place of what was reserved: what is too much goes from where it was, what is missing is spent now
local function correct(T, t, requests, tokens)
  if t[BILL] == 0 or not limited(T) then return end
  roll(T)
  local more = tokens - cost_of(t)
  if more > 0 then
    local i = place_of(T.at)
    T.spent[i] = T.spent[i] + more
  elseif t[BILL] > T.at - SLOTS and t[BILL] <= T.at then
    local i = place_of(t[BILL])
    T.used[i] = max(0, T.used[i] + requests - 1)
    T.spent[i] = max(0, T.spent[i] + more)
  end
  T.dirty = true
end

-- a ticket that was never dispatched, or that no engine began, costs nothing
local function refund(t)
  local T = tenant(t[TENANT])
  if T then correct(T, t, 0, 0) end
end

-- milliseconds until a list's window is empty
local function until_empty(T, list)
  for s = T.at, T.at - SLOTS + 1, -1 do
    if list[place_of(s)] > 0 then return (s - 1 + SLOTS) * SLOT_MS - now end
  end
  return 0
end

-- what the tenant has left: {requests, tokens, ms until all requests are back, ms until all tokens are}
local function quota_of(t)
  local T = tenant(t[TENANT])
  if not T or not limited(T) then return nil end
  roll(T)
  return {max(0, T.requests - sum(T.used)), max(0, T.tokens - sum(T.spent)), until_empty(T, T.used), until_empty(T, T.spent)}
end

-- tokens in flight ----------------------------------------------------------------------------------------------------------

-- a request that is larger than the cap may go alone
local function capped(T, t)
  return T and T.most_flight > 0 and T.flight > 0 and T.flight + t[PROMPT] + t[OUTPUT] > T.most_flight
end

-- a tenant at its cap leaves the order of this pool and class
local function park(P, rank, T, need)
  local A, id = account(P, rank, T.name)
  call('ZREM', prefix .. 'w:' .. rank .. ':' .. P.name, T.name)
  A[A_PARKED] = 1
  P.moved[id] = A
  T.need = #T.parked == 0 and need or min(T.need, need)
  T.parked[#T.parked + 1] = {P.name, rank}
  T.dirty = true
end

-- back into the order, without credit for the time outside of it
local function unpark(T)
  local list = T.parked
  T.parked, T.need, T.dirty = {}, 0, true
  for _, where in ipairs(list) do
    local P = pool(where[1])
    if P then
      local A, id = account(P, where[2], T.name)
      A[A_PARKED] = 0
      P.moved[id] = A
      if A[A_WAITING] > 0 then
        lift(class(P, where[2]), A)
        call('ZADD', prefix .. 'w:' .. where[2] .. ':' .. P.name, A[A_COUNTER], T.name)
      end
      P.blocked, P.dirty = 0, true
    end
  end
end

local function fly(t, tokens)
  local T = t[FLIGHT] >= 0 and tenant(t[TENANT])
  if not T then return end
  local less = tokens < t[FLIGHT]
  T.flight = T.flight + tokens - t[FLIGHT]
  T.dirty = true
  t[FLIGHT] = tokens
  if less and #T.parked > 0 and (T.flight == 0 or T.flight + T.need <= T.most_flight or T.most_flight == 0) then unpark(T) end
end
