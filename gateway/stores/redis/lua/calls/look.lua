-- Look a call up.
-- ARGV: session, lease, task id
-- Returns {} if the call is unknown, else {task id, state, replica, 1 if that lives else 0, outcome}.

local place, task = ARGV[1] .. ':' .. ARGV[2], ARGV[3]
local head = head_of(place, task)
local ends = redis.call('ZSCORE', key('call_ends', place), task)
if not head or not ends or tonumber(ends) <= now then
  return {}
end
return told(place, task, head)
