-- Let every opening that waits for an environment fail.
-- ARGV: environment, message, time that the message is kept for the replicas to fetch (s), fence
-- Returns how many.

if fenced() then
  return NOT_LEADING
end
return fail_all(ARGV[1], ARGV[2], 0, ARGV[3])
