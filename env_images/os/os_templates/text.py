"""Templates for text: logs, tables, JSON, configuration files."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

from os_templates.base import FOLDERS, WORDS, Draft, Template, lines, put, words


def column_sum(random: Random) -> Draft:
    path, regions = f"{random.choice(FOLDERS)}/sales.csv", ["north", "south", "east", "west"]
    rows = [(number, random.choice(regions), random.randint(5, 900)) for number in range(1, random.randint(40, 80))]
    region = rows[0][1]
    table = "".join(f"{number},{where},{amount}\n" for number, where, amount in rows)
    total = sum(amount for _, where, amount in rows if where == region)
    awk = f"awk -F, '$2 == \"{region}\" {{ sum += $3 }} END {{ print sum }}' {path}"
    return Draft(
        f"The file {path} has a header line and the columns id, region and amount. What is the sum of the amounts of "
        "the "
        f"region {region}?",
        (lines(put(path, f"id,region,amount\n{table}")),),
        (f"head -3 {path}", awk),
        answer=str(total),
        example=awk,
        wrong_answer=str(sum(amount for _, _, amount in rows)),
    )


def distinct_values(random: Random) -> Draft:
    path = f"{random.choice(FOLDERS)}/{random.choice(words(random, 3))}-visits.tsv"
    names = words(random, random.randint(6, 14))
    rows = [(random.choice(names), random.randint(1, 30)) for _ in range(random.randint(40, 70))]
    table = "".join(f"2024-03-{day:02}\t{name}\t{random.randint(1, 9)}\n" for name, day in rows)
    count = len({name for name, _ in rows})
    cut = f"cut -f2 {path} | sort -u | wc -l"
    return Draft(
        f"Each line of {path} has three columns, separated by tabs: a date, a visitor's name and a number of pages. "
        "How "
        "many different visitors are in it?",
        (lines(put(path, table)),),
        (f"head -3 {path}", cut),
        answer=str(count),
        example=cut,
        wrong_answer=str(len(rows)),
    )


def log_level(random: Random) -> Draft:
    path, level = f"/var/log/{random.choice(WORDS)}.log", random.choice(["ERROR", "WARN", "DEBUG"])
    hour = random.randint(1, 20)
    entries = []
    count = 0
    for minute in range(random.randint(70, 110)):
        then = hour + minute // 30
        said = random.choice(["ERROR", "WARN", "INFO", "DEBUG"])
        count += said == level and then == hour + 1
        about = random.choice(["disk slow", f"no {level} here", "client left", "retry"])
        entries.append(f"2024-05-02T{then:02}:{minute * 2 % 60:02}:07 {said} {random.choice(WORDS)}: {about}")
    grep = f"grep -cE '^2024-05-02T{hour + 1:02}:[^ ]* {level} ' {path} || true"
    return Draft(
        f"Each line of {path} starts with a time and a level, such as INFO. How many lines of the level {level} were "
        f"written from {hour + 1:02}:00:00 to {hour + 1:02}:59:59?",
        (lines(put(path, "\n".join(entries) + "\n")),),
        (f"head -2 {path}", grep),
        answer=str(count),
        example=grep,
        wrong_answer=str(sum(level in entry for entry in entries) + 1),
    )


def top_client(random: Random) -> Draft:
    path = f"/var/log/{random.choice(WORDS)}/access.log"
    clients = [f"10.{random.randint(0, 9)}.{random.randint(0, 99)}.{host}" for host in random.sample(range(2, 250), 6)]
    failing = clients[:4]
    hits = (
        [(failing[0], 502)] * 9 + [(clients[4], 200)] * 20 + [(client, 503) for client in failing[1:] for _ in range(5)]
    )
    hits += [(random.choice(clients), random.choice([200, 301, 404])) for _ in range(25)]
    random.shuffle(hits)
    text = "".join(
        f'{client} - - [12/Apr/2024:10:{n % 60:02}:00 +0000] "GET /{random.choice(WORDS)} HTTP/1.1" {status} '
        f"{500 + n}\n"
        for n, (client, status) in enumerate(hits)
    )
    awk = f"awk '$9 ~ /^5/ {{ print $1 }}' {path} | sort | uniq -c | sort -rn | awk 'NR == 1 {{ print $2 }}'"
    return Draft(
        f"{path} is a web server's access log; the number behind the quoted request is the status. Which client "
        "address "
        "got the most answers with a status of 500 or above?",
        (lines(put(path, text)),),
        (f"head -2 {path}", awk),
        answer=failing[0],
        example=awk,
        matcher="string-match",
        wrong_answer=clients[4],
    )


def replace_setting(random: Random) -> Draft:
    name, folder = random.choice(WORDS), random.choice(FOLDERS)
    path, (old, new) = f"{folder}/{name}.ini", random.sample(range(2_000, 9_000), 2)
    text = (
        f"# {name}\n# port = 80 was the default once\n[web]\nport = {{}}\nhost = 0.0.0.0\n\n"
        f"[metrics]\nport = {old}\nsupport = {old}\n"
    )
    return Draft(
        f"In {path}, set port in the section [web] to {new}. Change nothing else in the file, then finish.",
        (lines(put(path, text.format(old))),),
        (f"sed -i '/^\\[web\\]/,/^\\[/ s/^port = .*/port = {new}/' {path}",),
        state=({"read": path}, {"equals": text.format(new)}),
        wrong_commands=(f"sed -i 's/^port = .*/port = {new}/' {path}",),
    )


def json_count(random: Random) -> Draft:
    path = f"{random.choice(FOLDERS)}/{random.choice(WORDS)}-hosts.json"
    role, zone = random.choice(["db", "web", "cache"]), random.choice(["a", "b"])
    drawn = [
        (
            random.sample(["db", "web", "cache", "queue"], random.randint(1, 3)),
            random.choice("ab"),
            random.randint(1, 9),
        )
        for _ in range(random.randint(14, 26))
    ]
    hosts = [
        {"name": f"host-{number}", "roles": roles, "location": {"zone": where, "rack": rack}}
        for number, (roles, where, rack) in enumerate(drawn)
    ]
    count = sum(role in roles and where == zone for roles, where, _ in drawn)
    python = (
        f"""python3 -c 'import json; print(sum("{role}" in h["roles"] and h["location"]["zone"] == "{zone}" """
        f"""for h in json.load(open("{path}"))["hosts"]))'"""
    )
    return Draft(
        f'{path} lists hosts under the key "hosts". How many of them have the role {role} (among others, maybe) and '
        "are "
        f"in the zone {zone}?",
        (lines(put(path, json.dumps({"hosts": hosts}, indent=1) + "\n")),),
        (f"head -c 300 {path}", python),
        answer=str(count),
        example=python,
        wrong_answer=str(len(hosts)),
    )


def cron_jobs(random: Random) -> Draft:
    path, hour = f"{random.choice(FOLDERS)}/crontab", random.randint(1, 22)
    hours = [random.choice([str(hour), str(hour), "*", str(hour + 1), "0"]) for _ in range(random.randint(9, 16))]
    jobs = [
        f"{random.randint(0, 59)} {then} * * {random.choice('*15')} /usr/local/bin/{random.choice(WORDS)} --at {hour}"
        for then in hours
    ]
    jobs.insert(2, f"# 10 {hour} * * * /usr/local/bin/{random.choice(WORDS)}")
    jobs.insert(5, "")
    count = hours.count(str(hour))
    awk = f"awk '!/^#/ && NF && $2 == \"{hour}\"' {path} | wc -l"
    return Draft(
        f"{path} is a crontab. How many of its active entries name exactly the hour {hour} in the hour field? "
        "Entries that "
        "are commented out or that run in every hour do not count.",
        (lines(put(path, "\n".join(["SHELL=/bin/sh", *jobs]) + "\n")),),
        (f"cat {path}", awk),
        answer=str(count),
        example=awk,
        wrong_answer=str(count + 1),
    )


def line_lengths(random: Random) -> Draft:
    path, limit = f"{random.choice(FOLDERS)}/{random.choice(WORDS)}.txt", random.randint(30, 60)
    texts = [" ".join(random.choices(WORDS, k=random.randint(1, 14))) for _ in range(random.randint(25, 45))]
    texts[3] = "x" * limit
    texts[4] = "y" * (limit + 1)
    count = sum(len(text) > limit for text in texts)
    awk = f"awk 'length($0) > {limit}' {path} | wc -l"
    return Draft(
        f"How many lines of {path} are longer than {limit} characters, the end of the line not counted?",
        (lines(put(path, "\n".join(texts) + "\n")),),
        (awk,),
        answer=str(count),
        example=awk,
        wrong_answer=str(count + 1),
    )


def joined_tables(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    people = words(random, 8)
    rooms = {person: random.choice(["R1", "R2", "R3"]) for person in people}
    loans = [(random.choice(people[:6]), number) for number in range(random.randint(15, 30))]
    room = rooms[loans[0][0]]
    count = sum(rooms[person] == room for person, _ in loans)
    tables = (
        put(f"{folder}/rooms.txt", "".join(f"{person} {rooms[person]}\n" for person in people)),
        put(f"{folder}/loans.txt", "".join(f"item-{number} {person}\n" for person, number in loans)),
    )
    program = f'NR == FNR {{ room[$1] = $2; next }} room[$2] == "{room}"'
    awk = f"awk '{program}' {folder}/rooms.txt {folder}/loans.txt | wc -l"
    return Draft(
        f"{folder}/rooms.txt says who sits in which room, {folder}/loans.txt which item was lent to whom. How many "
        "items "
        f"were lent to people in room {room}?",
        (lines(*tables),),
        (f"head -3 {folder}/*.txt", awk),
        answer=str(count),
        example=awk,
        wrong_answer=str(len(loans) + 1),
    )


def sorted_report(random: Random) -> Draft:
    folder = random.choice(FOLDERS)
    source, target = f"{folder}/scores.txt", f"{folder}/ranking.txt"
    names, points = words(random, 9), random.sample(range(5, 150), 9)
    rows = list(zip(names, points, strict=True))
    ranking = "".join(f"{point} {name}\n" for name, point in sorted(rows, key=lambda row: -row[1])[:5])
    return Draft(
        f"Each line of {source} has a name and a number of points. Write the five lines with the most points into "
        f"{target}, "
        "most points first, each as the points, one space, and the name. Then finish.",
        (lines(put(source, "".join(f"{name} {point}\n" for name, point in rows))),),
        (f"sort -k2,2nr {source} | head -5 | awk '{{ print $2, $1 }}' > {target}",),
        state=({"read": target}, {"equals": ranking}),
        wrong_commands=(f"sort -k2,2r {source} | head -5 | awk '{{ print $1, $2 }}' > {target}",),
    )


def top_word(random: Random) -> Draft:
    path, (word, second, *rest) = f"{random.choice(FOLDERS)}/story.txt", words(random, 12)
    text = [word] * 7 + [word.capitalize()] * 6 + [second] * 10 + random.choices(rest, k=60)
    random.shuffle(text)
    rows = [" ".join(text[n : n + 9]) for n in range(0, len(text), 9)]
    most = Counter(token.lower() for token in text).most_common(1)[0][0]
    count = (
        f"tr -s ' ' '\\n' < {path} | tr A-Z a-z | tr -d '.' | sort | uniq -c | sort -rn | awk 'NR == 1 {{ print $2 }}'"
    )
    return Draft(
        f"Which word occurs most often in {path}, if capital and small letters are taken as the same? Answer with "
        "the word "
        "in small letters.",
        (lines(put(path, ".\n".join(rows) + ".\n")),),
        (count,),
        answer=most,
        example=count,
        matcher="string-match",
        wrong_answer=second,
    )


def effective_setting(random: Random) -> Draft:
    folder, key = random.choice(FOLDERS), random.choice(["workers", "timeout", "cache_mb"])
    values = random.sample(range(2, 400), 4)
    files = (
        put(f"{folder}/conf.d/10-base.conf", f"{key}={values[0]}\nmode=fast\n"),
        put(f"{folder}/conf.d/20-site.conf", f"mode=slow\n{key}={values[1]}\n#{key}={values[2]}\n"),
        put(f"{folder}/conf.d/30-late.conf.disabled", f"{key}={values[3]}\n"),
    )
    show = f"cat {folder}/conf.d/*.conf | grep '^{key}=' | tail -1 | cut -d= -f2"
    return Draft(
        f"A service reads all files in {folder}/conf.d whose names end in .conf, in the order of their names. Later "
        "settings "
        f"win over earlier ones, and lines that start with # are ignored. Which value does {key} have for the service?",
        (lines(*files),),
        (f"grep -r {key} {folder}/conf.d", show),
        answer=str(values[1]),
        example=show,
        wrong_answer=str(values[3]),
    )


def json_extreme(random: Random) -> Draft:
    path = f"{random.choice(FOLDERS)}/orders.jsonl"
    names, totals = words(random, 10), [random.randint(10, 99) * 10 for _ in range(10)]
    totals[4], totals[7] = 1_005 + random.randint(0, 50), 998
    orders = [
        {"customer": name, "items": [{"price": total // 2, "count": 1}, {"price": total - total // 2, "count": 1}]}
        for name, total in zip(names, totals, strict=True)
    ]
    python = (
        """python3 -c 'import json, sys; print(max(map(json.loads, sys.stdin), """
        f"""key=lambda o: sum(i["price"] * i["count"] for i in o["items"]))["customer"])' < {path}"""
    )
    return Draft(
        f"Each line of {path} is an order as a JSON object. The total of an order is the sum of price times count "
        "over its "
        "items. Which customer placed the order with the highest total?",
        (lines(put(path, "".join(json.dumps(order) + "\n" for order in orders))),),
        (f"head -2 {path}", python),
        answer=names[4],
        example=python,
        matcher="string-match",
        wrong_answer=names[7],
    )


def disable_cron(random: Random) -> Draft:
    path, (job, *others) = f"{random.choice(FOLDERS)}/jobs.cron", words(random, 6)
    entries = [f"{random.randint(0, 59)} {random.randint(0, 23)} * * * /opt/jobs/{name}" for name in others]
    entries.insert(random.randint(0, 4), f"15 2 * * * /opt/jobs/{job}")
    entries.append(f"@daily /opt/jobs/{job}-report")
    wanted = "".join(f"#{entry}\n" if entry.endswith(f"/{job}") else f"{entry}\n" for entry in entries)
    return Draft(
        f"{path} is a crontab. Disable the entry that runs /opt/jobs/{job} by putting a # directly in front of its "
        "line. "
        "Change nothing else, then finish.",
        (lines(put(path, "\n".join(entries) + "\n")),),
        (f"grep -n {job} {path}", f"sed -i 's|^.* /opt/jobs/{job}$|#&|' {path}"),
        state=({"read": path}, {"equals": wanted}),
        wrong_commands=(f"sed -i '/{job}/ s/^/#/' {path}",),
    )


TEMPLATES = (
    Template("column-sum", "tables", "train", 1, column_sum),
    Template("distinct-values", "tables", "train", 1, distinct_values),
    Template("log-level", "logs", "train", 2, log_level),
    Template("top-client", "logs", "train", 2, top_client),
    Template("replace-setting", "configuration", "train", 3, replace_setting),
    Template("json-count", "json", "train", 2, json_count),
    Template("cron-jobs", "cron", "train", 2, cron_jobs),
    Template("line-lengths", "text", "train", 1, line_lengths),
    Template("joined-tables", "tables", "train", 3, joined_tables),
    Template("sorted-report", "text", "train", 2, sorted_report),
    Template("top-word", "text", "test", 2, top_word),
    Template("effective-setting", "configuration", "test", 2, effective_setting),
    Template("json-extreme", "json", "test", 3, json_extreme),
    Template("disable-cron", "cron", "test", 2, disable_cron),
)
