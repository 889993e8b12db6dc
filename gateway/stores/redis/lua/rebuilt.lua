-- Mark the store as whole, and grant free slots to waiting openings.
-- ARGV: the time in which replicas write their notes again (s), the caller's fence
-- Returns 1.

-- In addition to the fence, the lead must have started in this run of the server, so that it rebuilt this data.
local lead = string.match(redis.call('GET', key('leader')) or '', '^%d+ %x+ ')
if fenced() or (ARGV[2] ~= '0' and lead ~= ARGV[2] .. ' ' .. run() .. ' ') then
  return NOT_LEADING
end
redis.call('SET', key('whole'), run())
known_whole = true

-- Deadlines passed while replicas could not renew them.
local least = after(ARGV[1])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', '(' .. least)) do
  if redis.call('HGET', key('session', id), 'state') == 'open' then
    redis.call('ZADD', key('deadlines'), least, id)
  end
end

for _, environment in ipairs(list_queues()) do
  sweep(environment)
  serve(environment)
  if redis.call('EXISTS', key('queue', environment)) == 1 then
    publish_wanted(environment)
  end
end
return 1
