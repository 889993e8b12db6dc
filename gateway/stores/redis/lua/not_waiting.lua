-- Find the openings of a replica that do not wait any more: it looks now and then, in case a message was lost.
-- ARGV: session id and lease of each
-- Returns the leases.

local settled = {}
for i = 1, #ARGV, 2 do
  if redis.call('HGET', key('ticket', ARGV[i]), 'lease') ~= ARGV[i + 1] then
    settled[#settled + 1] = ARGV[i + 1]
  end
end
return settled
