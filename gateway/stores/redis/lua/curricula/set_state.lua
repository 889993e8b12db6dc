-- Replace a sampler's state, if it has the version that the caller knows.
-- ARGV: curriculum, version, state
-- Returns 1, or 0 if the state has another version.

local curriculum = key('curriculum', ARGV[1])
if tonumber(redis.call('HGET', curriculum, 'version') or '0') ~= tonumber(ARGV[2]) then
  return 0
end
redis.call('HSET', curriculum, 'version', whole(tonumber(ARGV[2]) + 1), 'state', ARGV[3])
return 1
