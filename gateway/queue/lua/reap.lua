-- reap v2: removes what dead and moved processes left, a bounded piece per turn, by whoever comes by
-- (a process is dead when it has not beaten for DEAD_MS of logical time; its record goes first, so that one that only slept
--  hears `unknown` and declares itself again. Pieces by HRANDFIELD: HSCAN from 0 of a thinned hash returns empty pages)
local DYING_MS = 2500 -- without a beat: somebody should come by when it is dead
local DEAD_MS, EVERY_MS, SOON_MS, PIECE, AT_ONCE = 5000, 200, 10, 32, 8

-- (what they were charged and had reserved stays: nobody knows how far they came, and a process that comes back declares
--  them again without another charge)
-- -> how many tickets it removed, and whether some may be left
local function reap_one(process, most)
  local key = prefix .. 'p:' .. process
  call('DEL', key)
  living[process] = false
  local piece = call('HRANDFIELD', key .. ':l', most, 'WITHVALUES')
  local all = tickets_of(process)
  for i = 1, #piece, 2 do
    if all[piece[i]] == nil then all[piece[i]] = unpack_msg(piece[i + 1]) end
    if all[piece[i]] then remove(process, piece[i], all[piece[i]]) end
  end
  if #piece == 2 * most then return most, true end
  call('DEL', key .. ':m')
  call('ZREM', prefix .. 'procs', process)
  return #piece / 2, false
end

-- -> the logical time to remember as that of the last pass
local function reap(last)
  if now - last < EVERY_MS then return last end
  local dead = call('ZRANGEBYSCORE', prefix .. 'procs', '-inf', now - DEAD_MS, 'LIMIT', 0, AT_ONCE)
  local left, busy = PIECE, #dead == AT_ONCE
  for _, process in ipairs(dead) do
    if process ~= me then
      if left <= 0 then busy = true; break end
      local removed, more = reap_one(process, left)
      left = left - removed
      busy = busy or more
    end
  end
  local oldest = call('ZRANGEBYSCORE', prefix .. 'procs', '(' .. now - DEAD_MS, now - DYING_MS, 'WITHSCORES', 'LIMIT', 0, 1)
  if oldest[2] then later(max(1, oldest[2] + DEAD_MS - now)) end
  if not busy then return now end
  later(SOON_MS)
  return now - EVERY_MS + SOON_MS
end
