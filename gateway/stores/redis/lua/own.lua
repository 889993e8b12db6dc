-- Claim the store for a gateway. All its replicas do this at their start.
-- ARGV: the gateway's owner identity, '1' to take the store over from another owner without a live replica
-- Returns the store's owner after the call: the caller's, or another one.

local owner = redis.call('GET', key('owner'))
local heard_ms = tonumber(redis.call('GET', key('heard')) or '0')
if not owner or (ARGV[2] == '1' and heard_ms < now - SILENT_MS) then
  owner = ARGV[1]
  redis.call('SET', key('owner'), owner)
end
return owner
