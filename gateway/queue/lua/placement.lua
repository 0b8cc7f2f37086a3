-- placement v1: which backend takes a ticket
-- (the ticket's candidates come best first and by name; without candidates the backend with the most free slots)
local function find(P, t)
  if P.left <= 0 then return nil end
  local wanted = t[BACKENDS]
  if wanted then
    local slots = names(P)
    for i = 1, #wanted do
      local slot = slots[wanted[i]]
      if slot and P.free[slot] > 0 then return slot end
    end
    return nil
  end
  local best, most = nil, 0
  for slot, free in ipairs(P.free) do
    if free > most then best, most = slot, free end
  end
  return best
end

-- may this ticket start at all, now or later?
local function possible(P, t)
  if P.open == 0 then return false end
  local wanted = t[BACKENDS]
  if not wanted then return true end
  local slots = names(P)
  for i = 1, #wanted do
    local b = slots[wanted[i]] and backend(P, slots[wanted[i]])
    if b and b[B_OPEN] == 1 then return true end
  end
  return false
end
