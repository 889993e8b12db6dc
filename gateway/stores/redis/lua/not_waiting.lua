-- Find the openings of a replica that no longer wait. The replica checks this periodically, because a message may be
-- lost.
-- ARGV: session id and lease of each opening
-- Returns the leases of these openings.

local settled = {}
for i = 1, #ARGV, 2 do
  if redis.call('HGET', key('ticket', ARGV[i]), 'lease') ~= ARGV[i + 1] then
    settled[#settled + 1] = ARGV[i + 1]
  end
end
return settled
