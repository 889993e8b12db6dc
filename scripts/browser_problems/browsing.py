"""Browsing: links, tables, lists of several pages, and tabs. Many tasks are answered with a message."""

from __future__ import annotations

import json

from .problem import BY_ID, Problem, page

GOODS = {"lamp": ("Desk lamp", "24.90"), "kettle": ("Kettle", "39.50"), "globe": ("Globe", "58.00")}
SHOP = {
    "/": page(
        "Shop",
        "<h1>Shop</h1><ul>"
        + "".join(f"<li><a href=/goods/{slug}>{name}</a></li>" for slug, (name, _) in GOODS.items())
        + "</ul>",
    ),
    **{
        f"/goods/{slug}": page(
            name,
            f"<a href=/>Back</a><h1>{name}</h1><p>In stock</p>"
            f"<p><a href=/goods/{slug}/price>Price and delivery</a></p>",
        )
        for slug, (name, _) in GOODS.items()
    },
    **{
        f"/goods/{slug}/price": page(f"{name}: price", f"<h1>{name}</h1><table><tr><th>Price<td>{price} EUR</table>")
        for slug, (name, price) in GOODS.items()
    },
}
CITIES = [
    ("Arda", 41_200, 1904),
    ("Belmont", 8_730, 1877),
    ("Corvo", 127_450, 1921),
    ("Drava", 55_020, 1866),
    ("Esker", 9_870, 1952),
    ("Fenwick", 76_310, 1890),
]
TABLE = page(
    "Towns",
    "<h1>Towns</h1><table><tr><th>Town<th>People<th>Chartered</tr>"
    + "".join(f"<tr><td>{name}<td>{people}<td>{year}</tr>" for name, people, year in CITIES)
    + "</table>",
)
ORDERS = [
    (f"A-{100 + number}", "lost" if number == 23 else "sent" if number % 3 else "open") for number in range(1, 31)
]
PAGED = page(
    "Orders",
    "<h1>Orders</h1><p><label>Number <input id=answer></label><button id=report>Report as found</button></p>"
    "<table id=rows></table>"
    "<p><button id=back>Previous</button> <span id=place></span> <button id=next>Next</button></p>"
    "<p id=state role=status></p>",
    f"const orders = {json.dumps(ORDERS)}; let at = 0; {BY_ID}"
    + """
const show = () => { by('rows').innerHTML = '<tr><th>Order<th>Status' + orders.slice(at, at + 8).map(
  order => '<tr><td>' + order.join('<td>')).join(''); by('place').textContent = 'Page ' + (at / 8 + 1); };
by('back').addEventListener('click', () => { at = Math.max(0, at - 8); show(); });
by('next').addEventListener('click', () => { at = Math.min(24, at + 8); show(); });
by('report').addEventListener('click', () => { by('state').textContent = 'Reported ' + by('answer').value; });
show();""",
)
TOPICS = {"/": ("Atlas", {"Rivers": "/rivers", "Mountains": "/mountains"}), "/mountains": ("Mountains", {"Atlas": "/"})}
TOPICS |= {
    "/rivers": ("Rivers", {"Of Europe": "/rivers/europe", "Of Africa": "/rivers/africa"}),
    "/rivers/africa": ("Rivers of Africa", {"Nile": "/rivers/nile", "Niger": "/rivers/niger"}),
    "/rivers/europe": ("Rivers of Europe", {"Elbe": "/rivers/elbe", "Tagus": "/rivers/tagus"}),
    **{f"/rivers/{name}": (name.title(), {"Rivers": "/rivers"}) for name in ("nile", "niger", "elbe", "tagus")},
}
ATLAS = {
    path: page(
        title, f"<h1>{title}</h1><nav>{''.join(f'<p><a href={to}>{name}</a></p>' for name, to in links.items())}</nav>"
    )
    for path, (title, links) in TOPICS.items()
}
SEARCH = page(
    "Library",
    "<h1>Library</h1><form id=form><label>Search <input id=words></label><button>Search</button></form>"
    "<ul id=found></ul><p id=state role=status></p>",
    BY_ID
    + """const books = ['Salt Roads', 'The Glass Orchard', 'Orchard Keeping for Beginners', 'A Year of Rain'];
by('form').addEventListener('submit', event => { event.preventDefault(); const words = by('words').value.toLowerCase();
by('found').innerHTML = words ? books.filter(book => book.toLowerCase().includes(words)).map(
  book => '<li>' + book + ' <button data-book="' + book + '">Reserve</button></li>').join('') : '';
for (const button of by('found').querySelectorAll('button')) button.addEventListener('click', () => {
  by('state').textContent = 'Reserved: ' + button.dataset.book; }); });""",
)
PAIR = {
    "/": page(
        "Bicycles",
        "<h1>Bicycles</h1><p><a href=/swift target=_blank>Swift</a></p><p><a href=/tern target=_blank>Tern</a></p>",
    ),
    "/swift": page("Swift", "<h1>Swift</h1><p>Weight: 11.4 kg</p>"),
    "/tern": page("Tern", "<h1>Tern</h1><p>Weight: 10.9 kg</p>"),
}
OFFERS = {
    "/": page(
        "News",
        "<h1>News</h1><button id=open>Read on</button><p id=text hidden>The bridge opens in May.</p>",
        BY_ID
        + """by('open').addEventListener('click', () => { window.open('/offer', '_blank'); by('text').hidden = false;
document.cookie = 'read=yes'; });""",
    ),
    "/offer": page("Offer", "<h1>Buy now!</h1>"),
}
REFERENCE = {
    "/": page(
        "Claim",
        "<h1>Claim</h1><p><a href=/policy target=_blank>Your policy</a></p><form id=form>"
        "<label>Policy number <input id=number></label><button>Send</button></form><p id=state role=status></p>",
        BY_ID
        + """by('form').addEventListener('submit', event => { event.preventDefault();
by('state').textContent = by('number').value === 'PX-5512-K' ? 'Claim accepted' : 'Unknown policy'; });""",
    ),
    "/policy": page("Policy", "<h1>Policy</h1><p>Holder: R. Sand</p><p>Number: PX-5512-K</p>"),
}
SORTED = page(
    "Flights",
    "<h1>Flights</h1><table><thead>"
    "<tr><th><button id=by-price>Price</button><th><button id=by-time>Departure</button><th></tr>"
    "</thead><tbody id=rows></tbody></table><p id=state role=status></p>",
    BY_ID
    + """let flights = [[210, '17:40'], [145, '21:15'], [180, '06:20'], [320, '05:55'], [199, '12:05']];
const show = () => { by('rows').innerHTML = flights.map(([price, time], place) =>
  `<tr><td>${price} EUR<td>${time}<td><button data-at=${place}>Choose</button></tr>`).join('');
for (const button of by('rows').querySelectorAll('button')) button.addEventListener('click', () => {
  by('state').textContent = 'Chosen: ' + flights[button.dataset.at][1]; }); };
by('by-price').addEventListener('click', () => { flights.sort((a, b) => a[0] - b[0]); show(); });
by('by-time').addEventListener('click', () => { flights.sort((a, b) => a[1] < b[1] ? -1 : 1); show(); });
show();""",
)

TRAIN = [
    Problem(
        slug="find-price",
        level=1,
        tags=["navigation", "answer"],
        text="What does the kettle cost, in EUR? Send the number to the user.",
        config={"pages": SHOP},
        evaluation={"reward_function": "numeric_match(39.5)"},
        solution=["click({link 'Kettle'})", "click({link 'Price})", "send_msg_to_user('39.50')"],
        wrong=["send_msg_to_user('24.90')"],
    ),
    Problem(
        slug="largest-town",
        level=1,
        tags=["table", "answer"],
        text="Which town was chartered before 1900 and has the most people? Send its name to the user.",
        config={"html": TABLE},
        evaluation={"reward_function": "iexact_match('Fenwick')"},
        solution=["send_msg_to_user('Fenwick')"],
        wrong=["send_msg_to_user('Corvo')"],
    ),
    Problem(
        slug="lost-order",
        level=2,
        tags=["table", "pages"],
        text="One of the orders is lost. Enter its number and report it as found.",
        config={"html": PAGED},
        evaluation={"reward_function": "element_text_equals('#state', 'Reported A-123')"},
        solution=[
            "click({button 'Next'})",
            "click({button 'Next'})",
            "fill({textbox 'Number'}, 'A-123')\nclick({button 'Report as found'})",
        ],
    ),
    Problem(
        slug="atlas-elbe",
        level=1,
        tags=["navigation"],
        text="Go to the page about the river Elbe.",
        config={"pages": ATLAS},
        evaluation={"reward_function": "check_url_equals('/rivers/elbe')"},
        solution=["click({link 'Rivers'})", "click({link 'Of Europe'})", "click({link 'Elbe'})"],
        wrong=["click({link 'Mountains'})", "send_msg_to_user('Here it is.')"],
    ),
    Problem(
        slug="compare-in-tabs",
        level=2,
        tags=["tabs", "answer"],
        text="Each bicycle's page opens in a tab of its own. Which one is lighter? Send its name to the user.",
        config={"pages": PAIR},
        evaluation={"all": ["contains('Tern')", "not_contains('Swift')", "tab_url_contains('/tern')"]},
        solution=[
            "click({link 'Swift'})",
            "tab_focus(0)",
            "click({link 'Tern'})",
            "send_msg_to_user('The Tern is lighter.')",
        ],
        wrong=["send_msg_to_user('Swift')"],
    ),
    Problem(
        slug="close-the-offer",
        level=2,
        tags=["tabs"],
        text="Read on; close the offer that this opens, so that the news remain as the only tab.",
        config={"pages": OFFERS},
        evaluation={"all": ["cookie_equals('read', 'yes')", "tab_count(1)", "element_present('#text')"]},
        solution=["click({button 'Read on'})", "tab_focus(1)\ntab_close()"],
    ),
]
TEST = [
    Problem(
        slug="reserve-book",
        level=1,
        tags=["search"],
        text="Reserve the book about keeping an orchard.",
        config={"html": SEARCH},
        evaluation={"reward_function": "element_text_equals('#state', 'Reserved: Orchard Keeping for Beginners')"},
        solution=["fill({textbox 'Search'}, 'orchard')\nclick({button 'Search'})", "click({button 'Reserve'#2})"],
        wrong=[
            "fill({textbox 'Search'}, 'orchard')\nclick({button 'Search'})",
            "click({button 'Reserve'})",
            "send_msg_to_user('Reserved.')",
        ],
    ),
    Problem(
        slug="policy-number",
        level=2,
        tags=["tabs", "form"],
        text="Look your policy's number up, which opens in another tab, and send the claim with it.",
        config={"pages": REFERENCE},
        evaluation={"reward_function": "element_text_equals('#state', 'Claim accepted')"},
        solution=[
            "click({link 'Your policy'})",
            "tab_focus(0)",
            "fill({textbox 'Policy number'}, 'PX-5512-K')\nclick({button 'Send'})",
        ],
    ),
    Problem(
        slug="earliest-flight",
        level=2,
        tags=["table", "sorting"],
        text="Choose the flight that departs first of those that cost less than 200 EUR.",
        config={"html": SORTED},
        evaluation={"reward_function": "element_text_equals('#state', 'Chosen: 06:20')"},
        solution=["click({button 'Departure'})", "click({button 'Choose'#2})"],
        wrong=["click({button 'Departure'})", "click({button 'Choose'})", "send_msg_to_user('05:55')"],
    ),
]
