-- Make a paused or suspect worker ready, grant its slots to waiting openings, and close its environment's breaker.
-- ARGV: worker id
-- Returns 1, or 0 if the worker is unknown, or neither paused nor suspect.

local worker = redis.call('HMGET', key('worker', ARGV[1]), 'state', 'environment', 'rank', 'slots')
if worker[1] ~= 'paused' and worker[1] ~= 'suspect' then
  return 0
end
return make_ready(ARGV[1], worker, worker[4])
