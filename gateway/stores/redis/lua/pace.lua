-- Book the next start of an owner's openings (generic cell rate algorithm).
-- ARGV: owner, maximum number of starts a second, maximum wait (s)
-- Returns {'booked' or 'refused', time (ms, a string) after which the opening may start}.

local owner, per_s, within_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]) * 1000
local booked = redis.call('GET', key('starts', owner))
local ahead_ms = 0 -- the time after which all booked starts are used up
if booked then
  -- Kept as a time left and the moment at which it was left. So it never grows, even if the clock was set back since.
  local at_ms, left_ms = string.match(booked, '^(%-?%d+) ([%d.]+)$')
  ahead_ms = math.max(0, tonumber(left_ms) - math.max(0, now - tonumber(at_ms)))
end
local wait_ms = math.max(0, ahead_ms - (math.max(1, per_s) - 1) / per_s * 1000)
local wait = string.format('%.3f', wait_ms)
if tonumber(wait) > within_ms then
  return {'refused', wait}
end
ahead_ms = ahead_ms + 1000 / per_s
redis.call('SET', key('starts', owner), whole(now) .. ' ' .. string.format('%.6f', ahead_ms),
  'PX', whole(math.ceil(ahead_ms)))
return {'booked', wait}
