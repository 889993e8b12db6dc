-- Claim the store for a gateway, which all its replicas do as they start.
-- ARGV: the gateway's owner identity, '1' to take the store over from another owner of whom no replica is alive
-- Returns the owner whose store it is now: the caller, or another one.

local owner = redis.call('GET', key('owner'))
local heard_ms = tonumber(redis.call('GET', key('heard')) or '0')
if not owner or (ARGV[2] == '1' and heard_ms < now - SILENT_MS) then
  owner = ARGV[1]
  redis.call('SET', key('owner'), owner)
end
return owner
