-- fairness v2: who of the tenants is next, by virtual counters (VTC, arXiv 2401.00588), per pool, class and tenant
-- (a ticket is charged when it is dispatched, by what it is expected to be, and settled to the truth at its end. A tenant whose
--  queue was empty comes back at the class's virtual time at least: nobody saves up while idle. Weights are in the prices)
-- A class: {waiting, uncached tokens waiting, virtual time, debt, backlogs by log2: {tokens,
-- weights, tenants}, what its waits were (see shed)}; an account: {counter, waiting, uncached
-- tokens waiting, weight in the backlogs, leases, parked, until when those who were refused are told to come, credit}.
-- What a refund may not take off a counter is the tenant's credit while it has something waiting: it pays for up to half of
-- its next charges, so that nobody is passed by for it.
local C_WAITING, C_TOKENS, C_VIRTUAL, C_DEBT, C_BACKLOGS, C_WAITS = 1, 2, 3, 4, 5, 6
local A_COUNTER, A_WAITING, A_TOKENS, A_WEIGHT, A_LEASES, A_PARKED, A_BACK, A_CREDIT = 1, 2, 3, 4, 5, 6, 7, 8
local CREDITED = 0.5 -- part of a charge that refunds may pay for
local MOST_CHARGE = 1e12 -- one ticket may not drown everybody's counters
local FLOOR, WHOLE = 50, 1000 -- a lower class that waits is owed 50 of 1000 tokens that go ahead of it

local function class(P, rank)
  local C = P.classes[rank + 1]
  if C == 0 then C = {0, 0, 0, 0, {}, {now, 0, 0, 0, 0, 1000, 0}}; P.classes[rank + 1] = C end
  return C
end

local function account(P, rank, tenant)
  local id = rank .. ':' .. tenant
  local A = P.accounts[id]
  if not A then
    local raw = call('HGET', prefix .. 'a:' .. P.name, id)
    A = raw and unpack_msg(raw) or {0, 0, 0, 0, 0, 0, 0, 0}
    P.accounts[id] = A
  end
  return A, id
end

local function charge_of(t, output, ran)
  return min((ran and t[PREFILL_PRICE] * t[UNCACHED] or 0) + t[OUTPUT_PRICE] * output, MOST_CHARGE)
end

-- tenants by log2 of backlog / weight, so that the fair shares of all can be summed in a few steps
local function bucket(A)
  local _, exponent = frexp(A[A_TOKENS] / A[A_WEIGHT])
  return exponent + 64
end

local function backlog(C, A, sign)
  if A[A_TOKENS] <= 0 then return end
  local all, i = C[C_BACKLOGS], bucket(A)
  local part = all[i]
  if not part then part = {0, 0, 0}; all[i] = part end
  part[1] = part[1] + sign * A[A_TOKENS]
  part[2] = part[2] + sign * A[A_WEIGHT]
  part[3] = part[3] + sign
  if part[3] <= 0 then all[i] = nil end
end

-- uncached tokens that other tenants of the class may put ahead while this one has `own` served: their backlog, but no more
-- than their share by weight
local function others_ahead(C, A, own, weight)
  local sum, share = 0, own / weight
  local mine = A[A_TOKENS] > 0 and bucket(A)
  for i, part in pairs(C[C_BACKLOGS]) do
    if i == mine then sum = sum + min(part[1] - A[A_TOKENS], (part[2] - A[A_WEIGHT]) * share)
    else sum = sum + min(part[1], part[2] * share) end
  end
  return sum
end

-- one waiting ticket more or less; `weight` of the tenant as its ticket's price says it
local function weigh(P, rank, tenant, n, tokens, weight)
  local C, A, id = class(P, rank), account(P, rank, tenant)
  backlog(C, A, -1)
  A[A_WAITING], A[A_TOKENS] = A[A_WAITING] + n, A[A_TOKENS] + tokens
  if weight then A[A_WEIGHT] = weight end
  backlog(C, A, 1)
  C[C_WAITING], C[C_TOKENS] = C[C_WAITING] + n, C[C_TOKENS] + tokens
  if C[C_WAITING] == 0 then C[C_DEBT] = min(C[C_DEBT], 0) end
  P.waiting = P.waiting + n
  P.moved[id] = A
  P.dirty = true
  return C, A
end

local function lift(C, A)
  A[A_COUNTER], A[A_CREDIT] = max(A[A_COUNTER], C[C_VIRTUAL]), 0
end

-- a dispatch: the class's time moves to the tenant's, the tenant pays, and the classes below that wait are owed something
local function pay(P, t)
  local rank = t[RANK]
  local C, A, id = class(P, rank), account(P, rank, t[TENANT])
  C[C_VIRTUAL] = max(C[C_VIRTUAL], A[A_COUNTER])
  local charge = charge_of(t, t[OUTPUT], true)
  local less = min(A[A_CREDIT], floor(charge * CREDITED))
  A[A_COUNTER], A[A_CREDIT] = A[A_COUNTER] + charge - less, A[A_CREDIT] - less
  P.moved[id] = A
  P.dirty = true
  local tokens, above = t[UNCACHED] + t[OUTPUT], false
  for i = 1, RANKS do
    local other = P.classes[i]
    if other ~= 0 and other[C_WAITING] > 0 then
      if i > rank + 1 then other[C_DEBT] = other[C_DEBT] + FLOOR * tokens
      elseif i < rank + 1 then above = true end
    end
  end
  if above then C[C_DEBT] = C[C_DEBT] - WHOLE * tokens end
  return A
end

-- the end of a lease that was charged: the truth, but no refund below what the tenant would get by coming back now
local function settle(P, t, output, ran)
  local C, A, id = class(P, t[RANK]), account(P, t[RANK], t[TENANT])
  local counter = A[A_COUNTER]
  local truth = counter + charge_of(t, output, ran) - charge_of(t, t[OUTPUT], true)
  local least = min(counter, C[C_VIRTUAL])
  if truth < least then
    if A[A_WAITING] > 0 then A[A_CREDIT] = A[A_CREDIT] + least - truth; P.moved[id] = A end
    truth = least
  end
  if truth == counter then return end
  A[A_COUNTER] = truth
  P.moved[id] = A
  if A[A_WAITING] > 0 and A[A_PARKED] == 0 then
    call('ZADD', prefix .. 'w:' .. t[RANK] .. ':' .. P.name, 'XX', truth, t[TENANT])
  end
end

local function leases(P, t, n)
  local A, id = account(P, t[RANK], t[TENANT])
  A[A_LEASES] = A[A_LEASES] + n
  P.moved[id] = A
end

-- an idle account that is not ahead of its class says nothing: whoever comes back is lifted to there
local function idle(P, id, A)
  local C = P.classes[tonumber(id:match('^%d+')) + 1]
  return A[A_WAITING] == 0 and A[A_LEASES] == 0 and A[A_BACK] <= now and A[A_COUNTER] <= (C == 0 and 0 or C[C_VIRTUAL])
end

local function flush_accounts()
  for _, P in pairs(pools) do
    local args, n, gone = {}, 0, {}
    for id, A in pairs(P and P.moved or {}) do
      if idle(P, id, A) then gone[#gone + 1] = id
      else args[n + 1] = id; args[n + 2] = pack(A); n = n + 2 end
    end
    if n > 0 then call('HSET', prefix .. 'a:' .. P.name, unpack_list(args)) end
    if #gone > 0 then call('HDEL', prefix .. 'a:' .. P.name, unpack_list(gone)) end
  end
end

-- a few accounts at random that nobody touches: those that the class has overtaken go
local function sweep_accounts(P, most)
  local some = call('HRANDFIELD', prefix .. 'a:' .. P.name, most, 'WITHVALUES')
  for i = 1, #some, 2 do
    if not P.moved[some[i]] and idle(P, some[i], unpack_msg(some[i + 1])) then
      call('HDEL', prefix .. 'a:' .. P.name, some[i])
    end
  end
end
