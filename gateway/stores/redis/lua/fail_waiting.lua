-- Let every opening that waits for an environment fail, and for some time also those that find no free slot.
-- ARGV: environment, message, for how long (s; 0: its breaker stays as it is), time that the message is kept for the
-- replicas to fetch (s), fence
-- Returns how many failed.

if fenced() then
  return NOT_LEADING
end
if tonumber(ARGV[3]) > 0 then
  redis.call('HSET', key('breakers'), ARGV[1], after(ARGV[3]) .. ' ' .. ARGV[2])
end
return fail_all(ARGV[1], ARGV[2], math.ceil(tonumber(ARGV[3]) * 1000), ARGV[4])
