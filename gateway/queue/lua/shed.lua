-- shed v1: the last defences, which trust no forecast: where too many of a class have waited for too long, they wait less
-- (judged by the time that was waited, over an interval, whatever the length of the queue: CoDel, RFC 8289. Its minimum says
--  nothing where short prompts go ahead of long ones, so it is the part that waited past its target. What follows is a level per
--  class, the part of the arrivals that may not wait (DAGOR, arXiv 1806.04075), and half the target for those that do)
-- What a class's waits were: {when the interval began, how many left the line in it, how many of them late, level, spread of the
-- refusals, length of an interval, leaving per 1,000 s in the last}.
local W_SINCE, W_LEFT, W_LATE, W_LEVEL, W_SPREAD, W_EVERY, W_PACE = 1, 2, 3, 4, 5, 6, 7
local LEAST_EVERY_MS, EVERY_PART = 1000, 0.5 -- an interval: a part of the target, and a second at least
local FEW = 8 -- leave a line, before it is judged
local WHOLE_LEVEL, MOST_LEVEL = 1000, 950 -- some of a class always get in
local TOO_LATE, CALM = 333, 50 -- of 1,000 that left: late ones with which a class begins to shed, and sheds less again
local GAIN, EASE = 0.3, 0.8 -- of what is late in an interval, on top of the level; of the level, after a calm one
local HURRY = 0.5 -- part of the target after which one is late while its class sheds
local LONGEST_BACK_MS = 90000 -- with jitter within the 120 s that SDKs obey
local BACK_PART = 0.1 -- of the pool's pace, at which those who were refused are told to come again

-- after an interval in which enough have left: more, less, or nothing to refuse. Without them, time heals
local function judge(P, W)
  local elapsed, left = now - W[W_SINCE], W[W_LEFT]
  if elapsed < W[W_EVERY] then return end
  local level = W[W_LEVEL]
  if left >= FEW then
    local late = WHOLE_LEVEL * W[W_LATE] / left
    if late >= (level > 0 and CALM or TOO_LATE) then level = min(MOST_LEVEL, level + GAIN * late * (1 - level / WHOLE_LEVEL))
    else level = level * EASE - 1 end
    W[W_PACE] = floor(left * 1e6 / elapsed)
  elseif elapsed < FEW * W[W_EVERY] then return
  else level = level * EASE ^ floor(elapsed / W[W_EVERY]) - 1 end
  W[W_SINCE], W[W_LEFT], W[W_LATE], W[W_LEVEL] = now, 0, 0, max(0, floor(level))
  P.dirty = true
end

-- one has waited until now: is that too long?
local function late_already(P, t)
  local W = P.classes[t[RANK] + 1][C_WAITS]
  return now - t[SINCE] > t[TARGET] * (W[W_LEVEL] > 0 and HURRY or 1)
end

-- one leaves its line. `given_up`: not for an engine; that counts only if it waited for too long
local function departed(P, t, given_up)
  if t[TARGET] == 0 then return end
  local W, late = class(P, t[RANK])[C_WAITS], late_already(P, t)
  if given_up and not late then return end
  W[W_EVERY] = max(LEAST_EVERY_MS, floor(EVERY_PART * t[TARGET]))
  judge(P, W)
  W[W_LEFT] = W[W_LEFT] + 1
  if late then W[W_LATE] = W[W_LATE] + 1 end
  P.dirty = true
end

-- may this one not wait any longer?
local function overdue(P, t)
  if t[TARGET] == 0 then return false end
  return P.classes[t[RANK] + 1][C_WAITS][W_LEVEL] > 0 and late_already(P, t)
end

-- nobody of a class is let in who would not be in a better one
local function level_of(P, rank)
  local level = 0
  for i = 1, rank + 1 do
    local C = P.classes[i]
    if C ~= 0 and C[C_WAITS][W_LEVEL] > 0 then
      judge(P, C[C_WAITS])
      level = max(level, C[C_WAITS][W_LEVEL])
    end
  end
  return level
end

-- the weights of all tenants of a class with something waiting, and of one more
local function weights_of(C, A, weight)
  local weights = A[A_TOKENS] == 0 and weight or 0
  for _, part in pairs(C[C_BACKLOGS]) do weights = weights + part[2] end
  return weights
end

-- has this tenant, with one more, at least its part of what waits in the class? Who asks for less is not the one to go
local function crowds(C, A, weight)
  return (A[A_WAITING] + 1) * weights_of(C, A, weight) >= (C[C_WAITING] + 1) * weight
end

-- when to come again, in milliseconds, for one who might in `ms`: those of a tenant one after the other, since all together
-- would be refused again
local function back_ms(P, t, ms)
  local C, speed, weight = class(P, t[RANK]), sums_of(P)[S_SPEED], weight_of(t)
  local A, id = account(P, t[RANK], t[TENANT])
  ms = min(ms, LONGEST_BACK_MS)
  if speed > 0 then
    local at, tokens = max(now + ms, A[A_BACK]), t[UNCACHED] + t[OUTPUT] * t[OUTPUT_PRICE] / t[PREFILL_PRICE]
    if at > now + LONGEST_BACK_MS then at = now + max(ms, LONGEST_BACK_MS / 2) end
    local part = BACK_PART * weight / weights_of(C, A, weight)
    A[A_BACK] = floor(min(at + tokens * 1000 / speed / part, now + 2 * LONGEST_BACK_MS))
    P.moved[id], P.dirty = A, true
    ms = at - now
  end
  return ceil(max(ms, 1))
end

-- milliseconds until what waits in the class has left at the pace that was seen, a guess
local function left_ms(C) return max(C[C_WAITING] * 1e6 / max(1, C[C_WAITS][W_PACE]), LEAST_EVERY_MS) end

-- must this arrival, which would have to wait, go? -> milliseconds until it may come again, or nil
local function shed(P, t)
  if t[TARGET] == 0 then return nil end
  local level = level_of(P, t[RANK])
  if level == 0 then return nil end
  local C = class(P, t[RANK])
  if not crowds(C, account(P, t[RANK], t[TENANT]), weight_of(t)) then return nil end
  local W = C[C_WAITS]
  W[W_SPREAD] = W[W_SPREAD] + level
  P.dirty = true
  if W[W_SPREAD] < WHOLE_LEVEL then return nil end
  W[W_SPREAD] = W[W_SPREAD] - WHOLE_LEVEL
  return back_ms(P, t, left_ms(C))
end
