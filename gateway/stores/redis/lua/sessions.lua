-- List sessions that hold a slot, earliest deadline first.
-- ARGV: maximum number of sessions
-- Returns the sessions.

return read_all(redis.call('ZRANGE', key('deadlines'), 0, tonumber(ARGV[1]) - 1))
