-- Make a starting worker ready, grant its slots to waiting openings, and close its environment's breaker.
-- ARGV: worker id, address, the number of slots that it reported (0: the number that it was added with)
-- Returns 1, or 0 if the worker is unknown or not starting.

local worker = redis.call('HMGET', key('worker', ARGV[1]), 'state', 'environment', 'rank', 'slots')
if worker[1] ~= 'starting' then
  return 0
end
redis.call('HSET', key('worker', ARGV[1]), 'address', ARGV[2])
return make_ready(ARGV[1], worker, tonumber(ARGV[3]) > 0 and ARGV[3] or worker[4])
