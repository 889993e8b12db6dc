-- Start to close the given sessions that are open and whose deadline has passed.
-- ARGV: time within which each should be released (s), then session ids
-- Returns these sessions, in the order of the ids.

if not is_whole() then
  return {}
end
local sessions = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local deadline = redis.call('ZSCORE', key('deadlines'), id)
  if deadline and tonumber(deadline) <= now and redis.call('HGET', key('session', id), 'state') == 'open' then
    sessions[#sessions + 1] = begin_close(id, 'expired', ARGV[1])
  end
end
return sessions
