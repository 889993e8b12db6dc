-- Fail every opening that waits for an environment. Open its circuit breaker, which fails openings without a free slot.
-- ARGV: environment, message, time for which the breaker opens (s; 0: the breaker does not change), the caller's fence
-- Returns the number of failed openings.

if fenced() then
  return NOT_LEADING
end
local environment, message, for_s = ARGV[1], ARGV[2], tonumber(ARGV[3])
if for_s > 0 then
  redis.call('HSET', key('breakers'), environment, after(for_s) .. ' ' .. message)
end
sweep(environment)
local ids = redis.call('ZRANGE', key('waits', environment), 0, -1)
local number = #ids > 0 and whole(redis.call('INCR', key('number')))
for _, id in ipairs(ids) do
  local ticket = redis.call('HMGET', key('ticket', id), 'replica', 'lease', 'owner', 'group')
  redis.call('DEL', key('ticket', id))
  if ticket[4] and ticket[4] ~= '' then
    leave_group(environment, ticket[4], id)
  end
  if ticket[1] then
    redis.call('SET', key('failed', ticket[2]), number .. ' ' .. whole(math.ceil(for_s * 1000)), 'EX', FAILED_KEPT_S)
    redis.call('DEL', line(environment, ticket[3]))
    wake(ticket[1], ticket[2])
  end
end
if number then
  -- Stored once for all openings, because a thousand openings may fail with one worker's log as the message.
  redis.call('SET', key('cause', number), message, 'EX', FAILED_KEPT_S)
end
redis.call('DEL', key('waits', environment), key('queue', environment))
end_queue(environment)
return #ids
