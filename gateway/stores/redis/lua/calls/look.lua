-- Tell what is known of a call; of one that runs, remember who is to be woken at its end.
-- ARGV: session, lease, task id, the replica that waits ('' for none)
-- Returns {} if it is not known, else {task id, state, replica, 1 if that lives else 0, outcome}.

local place, task, waits = ARGV[1] .. ':' .. ARGV[2], ARGV[3], ARGV[4]
local head = head_of(place, task)
local ends = redis.call('ZSCORE', key('call_ends', place), task)
if not head or not ends or tonumber(ends) <= now then
  return {}
end
if waits ~= '' and head.state == 'running' then
  local waiting = redis.call('HGET', key('calls', place), 'wait:' .. task) or ''
  if not string.find('\n' .. waiting, '\n' .. waits .. '\n', 1, true) then
    redis.call('HSET', key('calls', place), 'wait:' .. task, waiting .. waits .. '\n')
  end
end
return told(place, task, head)
