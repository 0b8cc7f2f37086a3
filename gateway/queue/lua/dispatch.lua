-- dispatch v1: gives leases to those who wait while there is room
-- (at most GRANTS steps a turn; a ticket that fits nowhere may be passed by others, at most LOOKS are looked at; when none
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

local function step(P)
  local looks = 0
  for rank = 0, RANKS - 1 do
    if P.ranks[rank + 1] > 0 then
      for _, tenant in ipairs(call('ZRANGE', tenants_key(P, rank), 0, SIDE)) do
        local line = call('ZRANGE', line_key(P, rank, tenant), 0, SIDE)
        if #line == 0 then call('ZREM', tenants_key(P, rank), tenant) end
        for _, who in ipairs(line) do
          if try(P, rank, tenant, who) then return true end
          looks = looks + 1
          if looks >= LOOKS then return false end
        end
      end
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
