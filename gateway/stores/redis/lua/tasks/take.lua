-- Take one start, if the number of starts within a sliding window allows it.
-- ARGV: hash of the key whose starts are counted, maximum number of starts in the window, the window (s)
-- Returns 0 if the start was taken, else the milliseconds until the next start is possible.

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
