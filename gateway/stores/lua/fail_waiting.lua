-- Let every opening that waits for an environment fail.
-- ARGV: environment, message, time that the message is kept for the replicas to fetch (s)
-- Returns how many.

local environment = ARGV[1]
sweep(environment)
local ids = redis.call('ZRANGE', key('queue', environment), 0, -1)
for _, id in ipairs(ids) do
  local lease = redis.call('HGET', key('ticket', id), 'lease')
  redis.call('SET', key('failed', lease), ARGV[2], 'EX', ARGV[3])
  drop(environment, id)
end
return #ids
