-- Make a paused or suspect worker ready and give its slots to those that wait; the breaker of its environment is closed.
-- ARGV: worker id
-- Returns 1, or 0 if it is unknown or neither.

local worker = redis.call('HMGET', key('worker', ARGV[1]), 'state', 'environment', 'rank', 'slots')
if worker[1] ~= 'paused' and worker[1] ~= 'suspect' then
  return 0
end
return make_ready(ARGV[1], worker, worker[4])
