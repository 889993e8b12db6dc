-- Take one of so many starts in any window of time.
-- ARGV: whose they are, how many, the window (s)
-- Returns 0 if it was taken, else the milliseconds until the next one can be.

local list, starts, window = key('task_starts', ARGV[1]), tonumber(ARGV[2]), math.ceil(tonumber(ARGV[3]) * 1000)
local oldest = redis.call('LINDEX', list, starts - 1)
if oldest then
  local left = tonumber(oldest) + window - now
  if left > 0 then
    return math.min(left, window)
  end
end
redis.call('LPUSH', list, whole(now))
redis.call('LTRIM', list, 0, starts - 1)
redis.call('PEXPIRE', list, whole(window))
return 0
