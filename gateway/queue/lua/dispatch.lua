-- dispatch v3: gives leases to those who wait while there is room
-- (at most GRANTS steps and LOOKS looks a turn. A ticket that fits nowhere now may be passed by others, at most MOST_PASSED
--  times: then what it could use is kept for it. When none fits the pool is `blocked` until a ledger shrinks or a ticket
--  arrives that fits)
local GRANTS, LOOKS, SIDE, MOST_PASSED = 64, 64, 3, 8

-- (the lease says in how many milliseconds the first token should be there, without safety)
local function grant(P, process, number, t, slot)
  local b = backend(P, slot)
  local first = prefill_ms(b, b[B_PREFILL] + t[UNCACHED], b[B_RUNNING], context_of(b))
  departed(P, t, false)
  take(P, slot, t, t[UNCACHED], t[PROMPT] + t[OUTPUT], t[VARIANCE])
  local A = pay(P, t)
  leases(P, t, 1)
  if A[A_WAITING] > 0 and A[A_PARKED] == 0 then call('ZADD', tenants_key(P, t[RANK]), A[A_COUNTER], t[TENANT]) end
  fly(t, t[PROMPT] + t[OUTPUT])
  t[BACKENDS] = false
  keep(process, number, t)
  tell(process, number, GRANT, b[B_NAME], ceil(min(first, FAR_MS)), quota_of(t))
end

local function refuse(P, process, number, t, word, ms)
  departed(P, t, true)
  unlist(P, t[RANK], t[TENANT], member(process, number, t), t)
  drop(process, number)
  refund(t)
  tell(process, number, REFUSE, word, ms, quota_of(t))
end

-- nobody may have what this one could use
local function bar(P, t)
  if not t[BACKENDS] then P.held = true; return end
  P.barred = P.barred or {}
  for _, name in ipairs(t[BACKENDS]) do
    local slot = names(P)[name]
    if slot then P.barred[slot] = true end
  end
end

-- one waiting ticket -> true when something changed. Those that failed before it in this step have been passed
local function try(P, rank, name, who, first)
  local process, number = who:match('^(.*):(%d+)|%d+$')
  local t = ticket(process, number)
  if not t or t[STATE] ~= WAITING or not alive(process) then
    unlist(P, rank, name, who, t)
    if t and t[STATE] == WAITING then drop(process, number) end
    return true
  end
  if now > t[DEADLINE] then refuse(P, process, number, t, 'expired'); return true end
  if overdue(P, t) then refuse(P, process, number, t, 'overloaded', back_ms(P, t, left_ms(class(P, rank)))); return true end
  if not possible(P, t) then refuse(P, process, number, t, 'no_backend', 1000); return true end
  local T = tenant(name)
  if capped(T, t) then
    if first then park(P, rank, T, t[PROMPT] + t[OUTPUT]) end
    return first
  end
  local slot = find(P, t)
  if slot then
    unlist(P, rank, name, who, t)
    grant(P, process, number, t, slot)
    for _, passed in ipairs(P.failed) do
      passed[3][PASSED] = passed[3][PASSED] + 1
      keep(passed[1], passed[2], passed[3])
    end
    return true
  end
  if late(P, t) then
    refuse(P, process, number, t, 'deadline_unreachable', back_ms(P, t, (late_by(P, t, 0, 0))))
    return true
  end
  P.failed[#P.failed + 1] = {process, number, t}
  if t[PASSED] >= MOST_PASSED then bar(P, t) end
  return false
end

-- the tickets of one line from `from` on -> true when something changed
local function look(P, rank, name, from, most)
  local line = call('ZRANGE', line_key(P, rank, name), from, most)
  if from == 0 and #line == 0 then call('ZREM', tenants_key(P, rank), name); return true end
  for i, who in ipairs(line) do
    if P.held or P.looks <= 0 then return false end
    P.looks = P.looks - 1
    if try(P, rank, name, who, from + i == 1) then return true end
  end
  return false
end

-- one class: its first ticket, else the first few of its first few tenants -> true when something changed
local function step_class(P, rank)
  local order = call('ZRANGE', tenants_key(P, rank), 0, SIDE)
  if not order[1] then return false end
  if look(P, rank, order[1], 0, 0) or look(P, rank, order[1], 1, SIDE) then return true end
  for i = 2, #order do
    if look(P, rank, order[i], 0, SIDE) then return true end
  end
  return false
end

local function waits(P, rank) return P.classes[rank + 1] ~= 0 and P.classes[rank + 1][C_WAITING] > 0 end

-- lower classes that are owed something first, then all by rank
local function step(P)
  P.failed, P.barred, P.held = {}, nil, false
  for rank = RANKS - 1, 1, -1 do
    if waits(P, rank) and P.classes[rank + 1][C_DEBT] >= 0 and somebody_ahead(P, rank - 1) and step_class(P, rank) then
      return true
    end
  end
  for rank = 0, RANKS - 1 do
    if waits(P, rank) and step_class(P, rank) then return true end
  end
  return false
end

-- -> whether nothing more can be given now; false: it was cut short
local function dispatch(P)
  P.looks = LOOKS
  for _ = 1, GRANTS do
    if P.waiting <= 0 or (P.open > 0 and (P.blocked == 1 or P.left <= 0)) then return true end
    if not step(P) then
      if P.looks <= 0 then return false end
      P.blocked, P.dirty = 1, true
      return true
    end
  end
  return P.waiting <= 0
end
