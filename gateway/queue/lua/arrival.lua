-- arrival v2: whether a ticket that has to wait will be on time, and who goes when one of a tenant can't
-- (the largest ahead of it rather than the newcomer, which keeps most tickets on time (Moore-Hodgson): but only one that came
--  just now, and not when prompts of its size have had their share of that. What has waited is not put off for a newcomer, but
--  for one with plenty of time, which is short: it would hear late of what could have been said to the other at once)
local WALK = 32 -- tickets ahead that are read one by one
local YOUNG = 0.05 -- part of its time that the one which goes may have waited
local SURE = 2 -- a rough estimate that is so many times on time needs no better one
local SIZES = 1024 -- arrivals after which the guard's counts are halved
local PRIOR = 4 -- arrivals that the guard takes for granted of each size
local RETEST_MS, RETESTED = 100, 16 -- between two looks at what waits, and tickets looked at
local DOUBT = 0.2 -- part of the predicted time by which a waiting ticket must be late: predictions waver
local LEAST_MS = 1000 -- of a retry time that is only a guess

-- the pool's sums, or those of the few backends that a ticket may have
local function sums_for(P, t)
  local wanted = t[BACKENDS]
  if not wanted or #wanted > TRIES then return sums_of(P) end
  local sums, slots = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, names(P)
  for i = 1, #wanted do
    local slot = slots[wanted[i]]
    local share = slot and share_of(backend(P, slot)) or NO_SHARE
    for k = 1, #sums do sums[k] = sums[k] + share[k] end
  end
  return sums
end

-- milliseconds until enough running requests have ended for this one to be among those that may run: with long outputs it is
-- places, not prompts, that are waited for
local function place_ms(S, t, tokens, requests)
  local places, lean, held = S[S_LIMIT], S[S_LEAN_US], S[S_RUNNING] + 1
  if lean == 0 or places == 0 then return 0 end
  if S[S_KV_LIMIT] > 0 then
    local each = (S[S_KV] + t[PROMPT] + t[OUTPUT]) / held
    places = min(places, max(S[S_OPEN], floor(S[S_KV_LIMIT] * ROOM / OF / max(1, each))))
  end
  local short = held + requests - places
  if short <= 0 then return 0 end
  local output = (S[S_OUTPUTS] + (requests + 1) * t[OUTPUT]) / (held + requests)
  local steps = short * output / places
  return steps * lean / S[S_OPEN] / 1000 + (S[S_PREFILL] + tokens) * S[S_FIRST_NS] / S[S_OPEN] / S[S_OPEN] / 1e6
end

-- milliseconds to the first token, with safety, behind `requests` with `tokens` of prompts to be computed
local function wait_ms(P, t, tokens, requests)
  local S = sums_for(P, t)
  if S[S_OPEN] == 0 or S[S_SPEED] == 0 then return huge end
  local per_token = 1000 / S[S_SPEED]
  local prompts = (S[S_PREFILL] + tokens + t[UNCACHED]) * per_token
  local own = t[UNCACHED] * per_token * S[S_OPEN]
  return S[S_SAFETY] / S[S_OPEN] / 1000 * max(prompts, place_ms(S, t, tokens, requests) + own)
end

-- milliseconds by which a ticket behind this would be late, 0 or less if it is on time
local function late_by(P, t, tokens, requests)
  local first = wait_ms(P, t, tokens, requests)
  local over = now + first - t[DEADLINE]
  local S = t[TOTAL] > 0 and sums_for(P, t)
  if S and S[S_LEAN_US] > 0 then
    over = max(over, now + first + t[HIGH] * S[S_LEAN_US] / S[S_OPEN] / 1000 - t[TOTAL])
  end
  return over, first
end

-- what goes first for other reasons than the tenant's own line -> tokens, requests
local function before(P, t, A, own)
  local tokens, requests = 0, 0
  for i = 1, t[RANK] do
    local C = P.classes[i]
    if C ~= 0 then tokens = tokens + C[C_TOKENS]; requests = requests + C[C_WAITING] end
  end
  local C = class(P, t[RANK])
  if C[C_TOKENS] > 0 then
    local others = others_ahead(C, A, own + t[UNCACHED], weight_of(t))
    tokens = tokens + others
    requests = requests + others * C[C_WAITING] / C[C_TOKENS]
  end
  return tokens, requests
end

local function own_late_by(P, t, A, own, n)
  local tokens, requests = before(P, t, A, own)
  return late_by(P, t, tokens + own, requests + n)
end

-- the guard: by log2 of the prompt, how many had to wait and how many of them were turned away
local function sizes(P)
  if not P.sizes then
    local raw = call('HGET', P.key, 'sizes')
    P.sizes = raw and unpack_msg(raw) or {0, {}}
  end
  return P.sizes
end

local function size_of(tokens)
  local _, exponent = frexp(tokens)
  return max(1, exponent)
end

local function count_size(P, tokens, n, lost)
  local S, i = sizes(P), size_of(tokens)
  for k = #S[2] + 1, i do S[2][k] = {0, 0} end
  local one = S[2][i]
  one[1], one[2], S[1] = one[1] + n, one[2] + lost, S[1] + n
  if S[1] > SIZES then
    S[1] = 0
    for _, each in ipairs(S[2]) do
      each[1], each[2] = floor(each[1] / 2), floor(each[2] / 2)
      S[1] = S[1] + each[1]
    end
  end
  P.resized, P.dirty = true, true
end

-- after one more loss, do prompts of this size still get in half as often as all?
local function spared(P, tokens)
  local S, lost = sizes(P), 0
  for _, each in ipairs(S[2]) do lost = lost + each[2] end
  local one = S[2][size_of(tokens)]
  if not one or one[1] == 0 or S[1] == 0 then return false end
  return (one[1] - one[2] - 1 + PRIOR) / (one[1] + PRIOR) < 0.5 * (S[1] - lost) / S[1]
end

-- the tenant's own tickets ahead, one by one -> their tokens, and the largest
local function walk(line, n)
  local tokens, largest, most = 0, nil, -1
  for _, who in ipairs(call('ZRANGE', line, 0, n - 1)) do
    local each = tonumber(who:match('|(%d+)$'))
    tokens = tokens + each
    if each > most then largest, most = who, each end
  end
  return tokens, largest, most
end

-- may this one go in another's place? One that has waited for long would hear it late
local function young(t) return t[KEY] >= 0 and now - t[SINCE] <= YOUNG * (t[DEADLINE] - t[SINCE]) end

local function turn_away(P, process, number, t, who, ms, word)
  departed(P, t, true)
  unlist(P, t[RANK], t[TENANT], who, t)
  drop(process, number)
  refund(t)
  count_size(P, t[UNCACHED], 0, 1)
  tell(process, number, REFUSE, word or 'deadline_unreachable', back_ms(P, t, ms), quota_of(t))
end

-- by how many milliseconds the last of the line would be late with this one ahead of it; the last itself
local function last_late_by(P, t, A, line)
  local who = call('ZRANGE', line, -1, -1)[1]
  local process, number = who:match('^(.*):(%d+)|%d+$')
  local last = ticket(process, number)
  if not last or last[STATE] ~= WAITING then return 0 end
  return own_late_by(P, last, A, A[A_TOKENS] - last[UNCACHED] + t[UNCACHED], A[A_WAITING])
end

-- -> nil if the ticket may wait, else by how many milliseconds it would be late
local function admit(P, t)
  local A = account(P, t[RANK], t[TENANT])
  local line, own, n = line_key(P, t[RANK], t[TENANT]), 0, 0
  if A[A_WAITING] > 0 then
    n = call('ZCOUNT', line, '-inf', '(' .. t[KEY])
    own = A[A_TOKENS] * n / A[A_WAITING]
  end
  count_size(P, t[UNCACHED], 1, 0)
  local over, first = own_late_by(P, t, A, own, n)
  if over + (SURE - 1) * first <= 0 then return nil end
  local largest, most
  if n > 0 and n <= WALK then
    own, largest, most = walk(line, n)
    over = own_late_by(P, t, A, own, n)
  end
  if over <= 0 and n < A[A_WAITING] then over = last_late_by(P, t, A, line) end
  if over <= 0 then return nil end
  if largest and most > t[UNCACHED] and not spared(P, most) and own_late_by(P, t, A, own - most, n - 1) <= 0 then
    local process, number = largest:match('^(.*):(%d+)|%d+$')
    local victim = ticket(process, number)
    if victim and young(victim) then
      turn_away(P, process, number, victim, largest, over)
      return nil
    end
  end
  count_size(P, t[UNCACHED], 0, 1)
  return over
end

-- the first of one line, in order: who will be late goes
local function retest_line(P, rank, name)
  local A, own, n = account(P, rank, name), 0, 0
  for _, who in ipairs(call('ZRANGE', line_key(P, rank, name), 0, RETESTED - 1)) do
    local process, number = who:match('^(.*):(%d+)|%d+$')
    local t = ticket(process, number)
    if t and t[STATE] == WAITING and now <= t[DEADLINE] then
      local over, first = own_late_by(P, t, A, own, n)
      if overdue(P, t) then turn_away(P, process, number, t, who, left_ms(class(P, rank)), 'overloaded')
      elseif over > first * DOUBT then
        turn_away(P, process, number, t, who, over)
      else
        own, n = own + t[UNCACHED], n + 1
      end
    end
  end
end

-- what waits is looked at again from time to time, a line at a time: who will be late should hear it early
local function retest(P)
  if P.waiting == 0 or now - P.tested < RETEST_MS then return end
  P.tested, P.dirty = now, true
  local ranks = {}
  for i, C in ipairs(P.classes) do if C ~= 0 and C[C_WAITING] > 0 then ranks[#ranks + 1] = i - 1 end end
  local rank = ranks[floor(now / RETEST_MS) % #ranks + 1]
  local tenants_here = call('ZCARD', tenants_key(P, rank))
  if tenants_here == 0 then return end
  local i = floor(now / RETEST_MS) % tenants_here
  retest_line(P, rank, call('ZRANGE', tenants_key(P, rank), i, i)[1])
end

-- milliseconds until what waits is through, a guess
local function drain_ms(P, t, tokens, requests) return max(wait_ms(P, t, tokens, requests), LEAST_MS) end
