-- Count one more turn of an open session.
-- ARGV: session id, lease, key of the turn ('': none). A repetition of the last turn's key does not count.
-- Returns {'counted', turns}, {'closed', reason} or {'unknown'} (also for another lease, or a session being deleted).

local id, lease, turn_key = ARGV[1], ARGV[2], ARGV[3]
local session = redis.call('HMGET', key('session', id), 'lease', 'state', 'reason', 'turn_key', 'turns')
if session[1] ~= lease then
  return is_whole() and {'unknown'} or REBUILDING
end
if session[2] ~= 'open' then
  if session[3] and not is_trainers(session[3]) then
    return {'closed', session[3]}
  end
  return {'unknown'}
end
if turn_key ~= '' and turn_key == session[4] then
  return {'counted', tonumber(session[5])}
end
redis.call('HSET', key('session', id), 'turn_key', turn_key)
return {'counted', redis.call('HINCRBY', key('session', id), 'turns', 1)}
