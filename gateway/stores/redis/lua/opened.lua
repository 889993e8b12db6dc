-- Turn an opening session into an open one, and start its idle time. An open session keeps its handle, if it has one.
-- ARGV: session id, lease, its upstream's handle, the version of its scorer
-- Returns {'opened', session}, {'closed', reason} or {'unknown'} (also for another lease).

local id, lease = ARGV[1], ARGV[2]
local session = redis.call('HMGET', key('session', id), 'lease', 'state', 'reason', 'idle_s', 'handle', 'scorer')
if session[1] ~= lease then
  return is_whole() and {'unknown'} or REBUILDING
end
if session[2] ~= 'opening' and session[2] ~= 'open' then
  return {'closed', session[3]}
end
settled(id)
if session[2] == 'opening' or (session[5] or '') == '' then
  redis.call('HSET', key('session', id), 'state', 'open', 'handle', ARGV[3])
  if (session[6] or '') == '' then
    redis.call('HSET', key('session', id), 'scorer', ARGV[4])
  end
end
redis.call('ZADD', key('deadlines'), after(session[4]), id)
return {'opened', redis.call('HGETALL', key('session', id))}
