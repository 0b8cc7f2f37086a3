-- dispatch v1: gives leases to those who wait while there is room
-- (at most GRANTS steps a turn; a ticket that fits nowhere may be passed by others, LOOKS at most are tried for that; when none
--  fits the pool is `blocked` until a ledger shrinks or a ticket arrives)
local GRANTS, LOOKS, SIDE = 64, 16, 3

local function grant(P, process, number, t, slot)
  take(P, slot, t, t[PROMPT], t[PROMPT] + t[OUTPUT])
  keep(process, number, t)
  tell(process, number, GRANT, backend(P, slot)[B_NAME])
end

local function refuse(P, process, number, t, word, ms)
  unlist(P, t[RANK], t[TENANT], member(process, number, t))
  drop(process, number)
  tell(process, number, REFUSE, word, ms)
end

-- one waiting ticket -> true when something changed
local function try(P, rank, tenant, who)
  local process, number = who:match('^(.*):(%d+)|%d+$')
  local t = ticket(process, number)
  if not t or t[STATE] ~= WAITING or not alive(process) then
    unlist(P, rank, tenant, who)
    if t and t[STATE] == WAITING then drop(process, number) end
    return true
  end
  if now > t[DEADLINE] then refuse(P, process, number, t, 'expired'); return true end
  if not possible(P, t) then refuse(P, process, number, t, 'no_backend', 1000); return true end
  local slot = find(P, t)
  if not slot then return false end
  unlist(P, rank, tenant, who)
  grant(P, process, number, t, slot)
  return true
end

-- the first tickets of the first tenants of a class, in order
local function front(P, rank, tenants)
  local list = {}
  for _, tenant in ipairs(tenants) do
    local line = call('ZRANGE', line_key(P, rank, tenant), 0, SIDE, 'WITHSCORES')
    for i = 1, #line, 2 do list[#list + 1] = {tonumber(line[i + 1]), tenant, line[i]} end
  end
  sort(list, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[3] < b[3]) end)
  return list
end

-- one class -> true when something changed, and how many tickets may still be looked at
local function step_class(P, rank, looks)
  local tenants = call('ZRANGE', tenants_key(P, rank), 0, SIDE)
  local first = tenants[1] and call('ZRANGE', line_key(P, rank, tenants[1]), 0, 0)[1]
  if not first then
    if tenants[1] then call('ZREM', tenants_key(P, rank), tenants[1]) end
    return tenants[1] ~= nil, looks
  end
  if try(P, rank, tenants[1], first) then return true, looks end
  for _, entry in ipairs(front(P, rank, tenants)) do
    if entry[3] ~= first then
      if looks <= 0 then break end
      looks = looks - 1
      if try(P, rank, entry[2], entry[3]) then return true, looks end
    end
  end
  return false, looks
end

local function step(P)
  local looks, changed_here = LOOKS, false
  for rank = 0, RANKS - 1 do
    if P.ranks[rank + 1] > 0 then
      changed_here, looks = step_class(P, rank, looks)
      if changed_here then return true end
    end
  end
  return false
end

local function dispatch(P)
  for _ = 1, GRANTS do
    if P.waiting <= 0 or (P.open > 0 and (P.blocked == 1 or P.left <= 0)) then return end
    if not step(P) then P.blocked = 1; P.dirty = true; return end
  end
  if P.waiting > 0 then later(1) end
end
