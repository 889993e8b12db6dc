-- Look for the reply that ended an episode.
-- ARGV: session id
-- Returns the reply, or nil if none is kept (an error while the store is rebuilt).

local reply = redis.call('GET', key('reply', ARGV[1]))
if not reply and not is_whole() then
  return REBUILDING
end
return reply
