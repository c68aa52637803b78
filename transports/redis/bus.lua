-- The token bus's calls as one Redis function library: each runs alone, so each is atomic.
-- The rules are those of docs/token-bus.md; the arithmetic of lineages is that of transports/lineage.py.
-- @ stands for the library's version in the names of its functions (see bus.py).
--
-- KEYS: the job's hash, its head's hash, its list of tokens.  ARGV: 1 its channel, 2 the stream's life in ms, then
-- what each call says. Answers are lists of strings.

local FRAME_BYTES = 65536 -- a larger frame goes out as `look`: readers fetch it once instead of all at once

local function parse(lineage)
  local segments = {}
  for epoch, start in string.gmatch(lineage, '([^@,]+)@(%d+)') do
    segments[#segments + 1] = {epoch, tonumber(start)}
  end
  return segments
end

local function whole(number)
  return string.format('%.0f', number)
end

local function dump(segments)
  local parts = {}
  for i, segment in ipairs(segments) do parts[i] = segment[1] .. '@' .. whole(segment[2]) end
  return table.concat(parts, ',')
end

local function last_epoch(lineage)
  return string.match(lineage, '([^,@]+)@%d+$')
end

-- How many of the shown tokens are on this lineage.
local function kept(lineage, root, shown_root, shown_epoch, shown)
  if shown == 0 or root ~= shown_root then return 0 end
  local segments = parse(lineage)
  for i, segment in ipairs(segments) do
    if segment[1] == shown_epoch then
      local count = shown
      for k = i + 1, #segments do count = math.min(count, segments[k][2]) end
      return count
    end
  end
  return 0
end

-- Length of the prefix that two texts share.
local function common(one, one_count, other, other_count)
  local a, b = parse(one), parse(other)
  local limit = math.min(one_count, other_count)
  local at, i, j = 0, 1, 1
  while at < limit do
    while a[i + 1] and a[i + 1][2] <= at do i = i + 1 end
    while b[j + 1] and b[j + 1][2] <= at do j = j + 1 end
    if not a[i] or not b[j] or a[i][1] ~= b[j][1] then return at end
    at = math.min(a[i + 1] and a[i + 1][2] or limit, b[j + 1] and b[j + 1][2] or limit, limit)
  end
  return limit
end

-- Negative when the caller is an older owner than the stream's, positive when a newer.
local function compare(attempt, fence, held_attempt, held_fence)
  local by_attempt = tonumber(attempt) - tonumber(held_attempt)
  if by_attempt ~= 0 then return by_attempt end
  return tonumber(fence) - tonumber(held_fence)
end

local function publish(channel, message)
  redis.call('PUBLISH', channel, cjson.encode(message))
end

local function look(channel)
  publish(channel, {type = 'look'})
end

local function renew(keys, life)
  redis.call('PEXPIRE', keys[2], life)
  redis.call('PEXPIRE', keys[3], life)
end

local function rest(args, from)
  local items = {}
  for i = from, #args do items[#items + 1] = args[i] end
  return items
end

-- Append items[from..] in pieces, for unpack is bounded by Lua's stack.
local function push(key, items, from)
  from = from or 1
  while from <= #items do
    redis.call('RPUSH', key, unpack(items, from, math.min(from + 499, #items)))
    from = from + 500
  end
end

local function cut(key, count)
  if count == 0 then redis.call('DEL', key) else redis.call('LTRIM', key, 0, count - 1) end
end

local function with_tokens(answer, key, from)
  for _, token in ipairs(redis.call('LRANGE', key, from, -1)) do answer[#answer + 1] = token end
  return answer
end

local function seal_count(seal)
  return tonumber(string.match(seal, '^%d+'))
end

-- ARGV from 3: root, attempt, fence, epoch, mode, least, lineage, digests, token...
-- Answer: code, cancelled, crashes, lineage, seal, digests, token...
local function open(keys, args)
  local channel, life = args[1], args[2]
  local root, attempt, fence, epoch, mode = args[3], args[4], args[5], args[6], args[7]
  local least, lineage, digests = tonumber(args[8]), args[9], args[10]
  local job = redis.call('HMGET', keys[1], 'cancelled', 'crashes', 'terminal')
  local cancelled, crashes = job[1] or '0', job[2] or '0'
  local head = redis.call('HMGET', keys[2], 'root', 'attempt', 'fence', 'lineage', 'status', 'seal', 'digests')
  local function say(code, said_lineage, seal, said_digests)
    return {code, cancelled, crashes, said_lineage or '', seal or '', said_digests or ''}
  end
  if head[5] == 'fin' or job[3] then return say('finished') end
  if not head[1] then
    if mode == 'take' then return say('none') end
    redis.call('DEL', keys[2], keys[3])
    redis.call('HSET', keys[2], 'root', root, 'attempt', attempt, 'fence', fence, 'lineage', lineage,
      'status', 'open', 'digests', digests)
    push(keys[3], args, 11)
    renew(keys, life)
    look(channel)
    return say('fresh', lineage, '', digests)
  end
  if head[1] ~= root then return say('foreign') end
  if compare(attempt, fence, head[2], head[3]) < 0 then return say('fenced') end
  local count = redis.call('LLEN', keys[3])
  if mode == 'take' and count < least then return say('none') end
  redis.call('HSET', keys[2], 'attempt', attempt, 'fence', fence)
  if mode == 'restart' then
    lineage = epoch .. '@0'
    cut(keys[3], 0)
    redis.call('HSET', keys[2], 'lineage', lineage, 'digests', digests)
    redis.call('HDEL', keys[2], 'seal')
    renew(keys, life)
    look(channel)
    return say('have', lineage, '', digests)
  end
  local mine = rest(args, 11)
  local shared = common(head[4], count, lineage, #mine)
  if mode == 'mine' then
    local seal = head[6] or ''
    if head[4] ~= lineage or count ~= #mine then
      if shared < count then cut(keys[3], shared) end
      push(keys[3], mine, shared + 1)
      redis.call('HSET', keys[2], 'lineage', lineage)
      redis.call('HDEL', keys[2], 'seal')
      seal = ''
      look(channel)
    end
    renew(keys, life)
    return say('have', lineage, seal, head[7])
  end
  if mode == 'start' and count < #mine and shared == count then
    push(keys[3], mine, count + 1)
    redis.call('HSET', keys[2], 'lineage', lineage)
    redis.call('HDEL', keys[2], 'seal')
    renew(keys, life)
    look(channel)
    return with_tokens(say('have', lineage, '', head[7]), keys[3], 0)
  end
  local segments = {}
  for _, segment in ipairs(parse(head[4])) do
    if segment[2] <= count then segments[#segments + 1] = segment end
  end
  local seal, held = head[6] or '', head[4]
  if not (segments[#segments] and segments[#segments][1] == epoch) then
    segments[#segments + 1] = {epoch, count}
    held = dump(segments)
    redis.call('HSET', keys[2], 'lineage', held)
    if seal ~= '' and seal_count(seal) ~= count then
      redis.call('HDEL', keys[2], 'seal')
      seal = ''
    end
    look(channel)
  end
  renew(keys, life)
  return with_tokens(say('have', held, seal, head[7]), keys[3], 0)
end

-- ARGV from 3: root, attempt, fence, epoch, first, seal, token...   Answer: code, cancelled, next
local function append(keys, args)
  local channel, life = args[1], args[2]
  local root, attempt, fence, epoch, first, seal = args[3], args[4], args[5], args[6], tonumber(args[7]), args[8]
  local job = redis.call('HMGET', keys[1], 'cancelled', 'terminal')
  local cancelled = job[1] or '0'
  local head = redis.call('HMGET', keys[2], 'root', 'attempt', 'fence', 'lineage', 'status', 'seal')
  if not head[1] then return {job[2] and 'finished' or 'gone', cancelled, '0'} end
  local count = redis.call('LLEN', keys[3])
  if head[5] == 'fin' then return {'finished', cancelled, whole(count)} end
  if head[1] ~= root then return {'foreign', cancelled, '0'} end
  local age = compare(attempt, fence, head[2], head[3])
  if age < 0 then return {'fenced', cancelled, '0'} end
  if age > 0 or last_epoch(head[4]) ~= epoch then return {'reopen', cancelled, '0'} end
  if first == count then
    local sealed = head[6] and seal_count(head[6])
    if #args > 8 and not (sealed and sealed <= count) then
      local tokens, bytes = rest(args, 9), 0
      for _, token in ipairs(tokens) do bytes = bytes + #token end
      push(keys[3], tokens)
      count = count + #tokens
      if bytes > FRAME_BYTES then look(channel) else
        publish(channel, {type = 'frame', root = root, epoch = epoch, first = first, tokens = tokens})
      end
    end
    if seal ~= '' and seal_count(seal) == count then redis.call('HSET', keys[2], 'seal', seal) end
  end
  renew(keys, life)
  return {'ok', cancelled, whole(count)}
end

-- ARGV from 3: root, lineage, count, end, base, token...   Answer: code, base
local function finish(keys, args)
  local channel, life = args[1], args[2]
  local root, lineage, count, ending, base = args[3], args[4], tonumber(args[5]), args[6], tonumber(args[7])
  local head = redis.call('HMGET', keys[2], 'root', 'lineage', 'status')
  if head[3] == 'fin' then return {'done', '0'} end
  local held, shared = redis.call('LLEN', keys[3]), 0
  if head[1] == root then shared = common(head[2], held, lineage, count) end
  if base > shared then return {'need', whole(shared)} end
  local tokens = rest(args, 8)
  local filled = shared - base + 1 <= #tokens
  local shortened = head[1] and shared < held
  if not head[1] then redis.call('DEL', keys[3]) elseif shortened then cut(keys[3], shared) end
  push(keys[3], tokens, shared - base + 1)
  redis.call('DEL', keys[2])
  redis.call('HSET', keys[2], 'root', root, 'attempt', '0', 'fence', '0', 'lineage', lineage, 'status', 'fin',
    'count', whole(count), 'end', ending)
  renew(keys, life)
  if filled or shortened or not head[1] then look(channel) else
    publish(channel, {type = 'end', root = root, lineage = lineage, count = count, ['end'] = ending})
  end
  return {'ok', whole(shared)}
end

-- ARGV from 3: root, epoch, count of what is shown.
-- Answer: status, root, lineage, start, end, terminal, token...
local function read(keys, args)
  local root, epoch, shown = args[3], args[4], tonumber(args[5])
  local terminal = redis.call('HGET', keys[1], 'terminal') or ''
  local head = redis.call('HMGET', keys[2], 'root', 'lineage', 'status', 'count', 'end')
  if not head[1] then return {'none', '', '', args[5], '', terminal} end
  local start = kept(head[2], head[1], root, epoch, shown)
  if shown > 0 and head[3] == 'open' and root == head[1] and epoch ~= '' then
    local known, segments = false, parse(head[2])
    for _, segment in ipairs(segments) do known = known or segment[1] == epoch end
    if not known then
      local attempt, fence = string.match(epoch, '(%d+)%.(%d+)')
      local held_attempt, held_fence = string.match(segments[#segments][1], '(%d+)%.(%d+)')
      if attempt and held_attempt and compare(attempt, fence, held_attempt, held_fence) > 0 then
        return {'stale', '', '', args[5], '', terminal}
      end
    end
  end
  if head[3] == 'fin' then start = math.min(start, tonumber(head[4])) end
  return with_tokens({head[3], head[1], head[2], whole(start), head[5] or '', terminal}, keys[3], start)
end

-- ARGV: life in ms, offset, state, root, cancelled, crashes, terminal, also over the same offset (1) or not (0).
-- KEYS: the job's hash.
local function put_state(keys, args)
  if tonumber(redis.call('HGET', keys[1], 'offset') or '-1') >= tonumber(args[2]) + tonumber(args[8]) then return 'old' end
  redis.call('HSET', keys[1], 'offset', args[2], 'state', args[3], 'crashes', args[6])
  if args[4] ~= '' then redis.call('HSET', keys[1], 'root', args[4]) end
  if args[5] ~= '' then redis.call('HSET', keys[1], 'cancelled', '1') end
  if args[7] ~= '' then redis.call('HSET', keys[1], 'terminal', args[7]) end
  redis.call('PEXPIRE', keys[1], args[1])
  return 'ok'
end

-- ARGV: life in ms, state.   KEYS: the job's hash.
local function note_queued(keys, args)
  redis.call('HSETNX', keys[1], 'state', args[2])
  redis.call('PEXPIRE', keys[1], args[1])
  return 'ok'
end

-- ARGV: life in ms.   KEYS: the job's hash.
local function cancel(keys, args)
  redis.call('HSET', keys[1], 'cancelled', '1')
  redis.call('PEXPIRE', keys[1], args[1])
  return 'ok'
end

redis.register_function('@_open', open)
redis.register_function('@_append', append)
redis.register_function('@_finish', finish)
redis.register_function{function_name = '@_read', callback = read, flags = {'no-writes'}}
redis.register_function('@_put_state', put_state)
redis.register_function('@_note_queued', note_queued)
redis.register_function('@_cancel', cancel)
