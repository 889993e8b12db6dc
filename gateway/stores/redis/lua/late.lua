-- List open sessions whose deadline has passed, earliest first, without changing them.
-- ARGV: maximum number of sessions
-- Returns the sessions.

return read_all(passed(tonumber(ARGV[1]), true))
