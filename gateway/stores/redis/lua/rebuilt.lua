-- Say that the store is whole, and give free slots to those that waited for it.
-- ARGV: the time in which replicas write their notes again (s), the caller's fence
-- Returns 1.

-- Beyond the fence: what was rebuilt must be this very data, so the lead must have begun in it.
local lead = string.match(redis.call('GET', key('leader')) or '', '^%d+ %x+ ')
if fenced() or (ARGV[2] ~= '0' and lead ~= ARGV[2] .. ' ' .. run() .. ' ') then
  return NOT_LEADING
end
redis.call('SET', key('whole'), run())
known_whole = true

-- Deadlines ran on while nobody could renew them.
local least = after(ARGV[1])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', '(' .. least)) do
  if redis.call('HGET', key('session', id), 'state') == 'open' then
    redis.call('ZADD', key('deadlines'), least, id)
  end
end

for _, environment in ipairs(redis.call('SMEMBERS', key('queues'))) do
  sweep(environment)
  serve(environment)
  if redis.call('EXISTS', key('queue', environment)) == 1 then
    publish_wanted(environment)
  end
end
return 1
