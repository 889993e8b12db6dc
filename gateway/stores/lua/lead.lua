-- Become or stay the leader of the control loop; on the way, notice jumps of Redis' clock.
-- ARGV: replica, for how long (s), name of the caller's clock, its reading (ms, monotonic), the smallest difference
-- that is a jump (ms), how long readings of a clock are kept (ms)
-- Returns 1, or 0 if another replica is.

-- Redis only knows the wall clock. Between two calls of one caller it should have moved as far as the caller's own,
-- monotonic clock did; what it moved beyond that is taken out of every later reading. All that might lead are looked
-- at, not the leader alone: a jump ends its lead as well.
local clock, caller_ms, kept_ms = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[6])
local reading = redis.call('HGET', key('paced'), clock)
if reading then
  local before_ms, before_now = string.match(reading, '^(%-?%d+) (%-?%d+)$')
  local jump = (now - tonumber(before_now)) - (caller_ms - tonumber(before_ms))
  if math.abs(jump) >= tonumber(ARGV[5]) then
    redis.call('INCRBY', key('jumped'), whole(jump))
    now = now - jump
  end
else
  -- A process began: those that ended may be forgotten.
  local readings = redis.call('HGETALL', key('paced'))
  for i = 1, #readings, 2 do
    if tonumber(string.match(readings[i + 1], ' (%-?%d+)$')) < now - kept_ms then
      redis.call('HDEL', key('paced'), readings[i])
    end
  end
end
redis.call('HSET', key('paced'), clock, whole(caller_ms) .. ' ' .. whole(now))

local leader = redis.call('GET', key('leader'))
if leader and leader ~= ARGV[1] then
  return 0
end
redis.call('SET', key('leader'), ARGV[1], 'PX', whole(math.ceil(tonumber(ARGV[2]) * 1000)))
return 1
