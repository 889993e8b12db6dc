-- List all definitions.
-- Returns {version, {curriculum, body, ...}}.

return {redis.call('GET', key('curriculum_version')) or '', redis.call('HGETALL', key('curriculum_definitions'))}
