"""Pointing: dragging, menus, dialogs, elements hidden until they are opened, and elements that must stay unchanged."""

from __future__ import annotations

from .problem import BY_ID, Problem, page

BOARD = page(
    "Board",
    "<style>.column{width:220px;min-height:200px}</style><h1>Board</h1><div style='display:flex'>"
    "<div id=todo class='card column'><h2>To do</h2>"
    "<div class=card draggable=true id=write role=button>Write report</div>"
    "<div class=card draggable=true id=call role=button>Call supplier</div></div>"
    "<div id=done class='card column' role=region aria-label=Done><h2>Done</h2></div></div>",
    BY_ID
    + """for (const card of document.querySelectorAll('[draggable]')) card.addEventListener('dragstart',
  event => event.dataTransfer.setData('text/plain', card.id));
for (const column of [by('todo'), by('done')]) {
  column.addEventListener('dragover', event => event.preventDefault());
  column.addEventListener('drop', event => { event.preventDefault();
    column.append(by(event.dataTransfer.getData('text/plain'))); }); }""",
)
PUZZLE = page(
    "Sorting",
    "<h1>Sort</h1><p>Put the numbers into ascending order by dragging one onto another: the two change places.</p>"
    "<div id=row style='display:flex'>"
    + "".join(
        f"<div class=card role=button style='width:60px;height:40px' data-n={number}>{number}</div>"
        for number in (7, 2, 9)
    )
    + "</div><p>Order: <output id=order>7 2 9</output></p>",
    BY_ID
    + """let held = null;
const numbers = () => [...by('row').children];
by('row').addEventListener('mousedown', event => { held = event.target.closest('[data-n]'); event.preventDefault(); });
by('row').addEventListener('mouseup', event => { const other = event.target.closest('[data-n]');
  if (held && other && other !== held) { const text = held.textContent;
    held.textContent = other.textContent; other.textContent = text;
    by('order').textContent = numbers().map(each => each.textContent).join(' '); }
  held = null; });""",
)
MENU = page(
    "Editor",
    "<style>.sub{display:none}.item:hover>.sub,.item:focus-within>.sub{display:block}</style><h1>Editor</h1>"
    "<div class=item style='width:160px'><button id=file>File</button><div class=sub><button id=save>Save</button>"
    "<div class=item><button id=export>Export</button><div class=sub><button id=pdf>As PDF</button>"
    "<button id=csv>As CSV</button></div></div></div></div><p id=state role=status></p>",
    BY_ID
    + """for (const id of ['save', 'pdf', 'csv']) by(id).addEventListener('click', () => {
by('state').textContent = 'Chosen: ' + id; });""",
)
PROJECTS = page(
    "Projects",
    "<h1>Projects</h1><ul id=list><li>apollo <button data-name=apollo>Delete</button></li>"
    "<li>mercury <button data-name=mercury>Delete</button></li></ul>"
    "<dialog id=dialog aria-label=Confirm><p>Type the project's name to delete it.</p>"
    "<label>Name <input id=name></label><button id=really>Delete for ever</button>"
    "<button id=no>Cancel</button></dialog>",
    BY_ID
    + """let asked = '';
for (const button of document.querySelectorAll('li button')) button.addEventListener('click', () => {
  asked = button.dataset.name; by('name').value = ''; by('dialog').showModal(); });
by('no').addEventListener('click', () => by('dialog').close());
by('really').addEventListener('click', () => { if (by('name').value !== asked) return;
  document.querySelector('[data-name=' + asked + ']').parentElement.remove(); by('dialog').close(); });""",
)
ROWS = page(
    "Members",
    "<h1>Members</h1><ul id=list><li id=kim>Kim <button>Remove</button></li><li id=lee>Lee <button>Remove</button></li>"
    "<li id=noa>Noa <button>Remove</button></li></ul>",
    """for (const button of document.querySelectorAll('li button')) button.addEventListener('click', () => {
if (confirm('Remove this member?')) button.parentElement.remove(); });""",
)
SAFE = page(
    "Safe",
    "<h1>Safe</h1><details><summary>Hints</summary><p>Below the manual.</p></details><details><summary>Manual</summary>"
    "<p>Turn clockwise.</p><details><summary>Code</summary><p>The code is 4096.</p></details></details>"
    "<label>Code <input id=code></label><button id=open>Open</button><p id=state role=status></p>",
    BY_ID
    + """by('open').addEventListener('click', () => {
by('state').textContent = by('code').value === '4096' ? 'The safe is open' : 'Wrong code'; });""",
)
CART = page(
    "Market",
    "<h1>Market</h1><ul>"
    + "".join(
        f"<li>{name} <button data-name={name.lower()}>Add {name.lower()}</button></li>"
        for name in ("Apples", "Bread", "Cheese")
    )
    + "</ul><p>Cart: <output id=cart>empty</output></p><button id=order>Order</button><p id=state role=status></p>",
    BY_ID
    + """const held = {};
for (const button of document.querySelectorAll('[data-name]')) button.addEventListener('click', () => {
  held[button.dataset.name] = (held[button.dataset.name] || 0) + 1;
  by('cart').textContent = Object.entries(held).sort().map(([name, count]) => count + ' ' + name).join(', '); });
by('order').addEventListener('click', () => { by('state').textContent = 'Ordered: ' + by('cart').textContent; });""",
)
INBOX = page(
    "Inbox",
    "<h1>Inbox</h1><ul id=list>"
    + "".join(
        f"<li id={slug}>{title} <button aria-label='Delete {title}'>x</button></li>"
        for slug, title in (("rent", "Rent is due"), ("spam", "You have won!"), ("trip", "Trip on Friday"))
    )
    + "</ul>",
    "for (const button of document.querySelectorAll('li button'))"
    "button.addEventListener('click', () => button.parentElement.remove());",
)
CALENDAR = page(
    "Calendar",
    "<h1>Calendar</h1><p><button id=back>Earlier</button> <b id=month></b> <button id=next>Later</button></p>"
    "<div id=days></div><p id=state role=status></p>",
    BY_ID
    + """let at = new Date(Date.UTC(2031, 0, 1));
const show = () => { const year = at.getUTCFullYear(), month = at.getUTCMonth();
  by('month').textContent = at.toLocaleString('en-US', {month: 'long', year: 'numeric', timeZone: 'UTC'});
  by('days').innerHTML = Array.from({length: new Date(Date.UTC(year, month + 1, 0)).getUTCDate()},
    (_, day) => '<button>' + (day + 1) + '</button>').join('');
  for (const button of by('days').children) button.addEventListener('click', () => { by('state').textContent =
    'Chosen: ' + new Date(Date.UTC(year, month, +button.textContent)).toISOString().slice(0, 10); }); };
by('back').addEventListener('click', () => { at.setUTCMonth(at.getUTCMonth() - 1); show(); });
by('next').addEventListener('click', () => { at.setUTCMonth(at.getUTCMonth() + 1); show(); });
show();""",
)
TERMS = page(
    "Terms",
    "<h1>Terms</h1><div id=terms tabindex=0 style='height:120px;overflow:auto;width:300px'>"
    + "".join(f"<p>Clause {number}: nothing of note.</p>" for number in range(1, 31))
    + "</div><button id=accept disabled>Accept</button><p id=state role=status></p>",
    BY_ID
    + """by('terms').addEventListener('scroll', () => { const box = by('terms');
if (box.scrollTop + box.clientHeight > box.scrollHeight - 5) by('accept').disabled = false; });
by('accept').addEventListener('click', () => { by('state').textContent = 'Accepted'; });""",
)
SUGGEST = page(
    "Stations",
    "<h1>Stations</h1><label>Station <input id=station autocomplete=off></label><div id=found role=listbox></div>"
    "<p id=state role=status></p>",
    BY_ID
    + """const stations = ['Northgate', 'North Harbour', 'Norwood', 'Southgate'];
by('station').addEventListener('keyup', () => { const typed = by('station').value.toLowerCase();
  by('found').innerHTML = typed ? stations.filter(name => name.toLowerCase().startsWith(typed)).map(
    name => '<div role=option>' + name + '</div>').join('') : '';
  for (const option of by('found').children) option.addEventListener('click', () => {
    by('station').value = option.textContent; by('state').textContent = 'Station: ' + option.textContent;
    by('found').innerHTML = ''; }); });""",
)

TRAIN = [
    Problem(
        slug="drag-card",
        level=2,
        tags=["drag"],
        text="Drag the card 'Call supplier' from 'To do' to 'Done'.",
        config={"html": BOARD},
        evaluation={"all": ["element_present('#done #call')", "element_present('#todo #write')"]},
        solution=["drag_and_drop({button 'Call supplier'}, {region 'Done'})"],
        wrong=["drag_and_drop({button 'Write report'}, {region 'Done'})", "send_msg_to_user('Done.')"],
    ),
    Problem(
        slug="drag-sort",
        level=3,
        tags=["drag"],
        text="Drag the numbers into ascending order.",
        config={"html": PUZZLE},
        evaluation={"reward_function": "element_text_equals('#order', '2 7 9')"},
        solution=["drag_and_drop({button '7'}, {button '2'})"],
        wrong=["drag_and_drop({button '7'}, {button '9'})", "send_msg_to_user('Sorted.')"],
    ),
    Problem(
        slug="nested-menu",
        level=2,
        tags=["menu"],
        text="Export as CSV with the menu File.",
        config={"html": MENU},
        evaluation={"reward_function": "element_text_equals('#state', 'Chosen: csv')"},
        solution=["hover({button 'File'})", "hover({button 'Export'})", "click({button 'As CSV'})"],
    ),
    Problem(
        slug="confirm-by-name",
        level=2,
        tags=["dialog", "form"],
        text="Delete the project mercury.",
        config={"html": PROJECTS},
        evaluation={
            "all": ["element_count('[data-name=mercury]', 0)", "element_count('[data-name=apollo]', 1)"],
            "fail": "element_count('[data-name=apollo]', 0)",
        },
        solution=["click({button 'Delete'#2})", "fill({textbox 'Name'}, 'mercury')\nclick({button 'Delete for ever'})"],
        wrong=["click({button 'Delete'})", "fill({textbox 'Name'}, 'apollo')\nclick({button 'Delete for ever'})"],
    ),
    Problem(
        slug="open-the-safe",
        level=2,
        tags=["disclosure", "form"],
        text="Find the code and open the safe.",
        config={"html": SAFE},
        evaluation={"reward_function": "element_text_equals('#state', 'The safe is open')"},
        solution=[
            "click({DisclosureTriangle 'Manual'})",
            "click({DisclosureTriangle 'Code'})",
            "fill({textbox 'Code'}, '4096')\nclick({button 'Open'})",
        ],
    ),
    Problem(
        slug="market-order",
        level=1,
        tags=["list"],
        text="Order two apples and one cheese.",
        config={"html": CART},
        evaluation={"reward_function": "element_text_equals('#state', 'Ordered: 2 apples, 1 cheese')"},
        solution=[
            "click({button 'Add apples'})\nclick({button 'Add apples'})\nclick({button 'Add cheese'})",
            "click({button 'Order'})",
        ],
    ),
    Problem(
        slug="delete-spam",
        level=1,
        tags=["list"],
        text="Delete the message that is spam, and no other.",
        config={"html": INBOX},
        evaluation={
            "all": ["element_count('#spam', 0)", "element_count('#list li', 2)"],
            "fail": {"any": ["element_count('#rent', 0)", "element_count('#trip', 0)"]},
        },
        solution=["click({button 'Delete You have won!'})"],
        wrong=["click({button 'Delete Rent is due'})"],
    ),
]
TEST = [
    Problem(
        slug="remove-member",
        level=2,
        tags=["dialog", "list"],
        text="Remove Lee from the members. What the page asks is confirmed for you.",
        config={"html": ROWS, "dialogs": "accept"},
        evaluation={"all": ["element_count('#lee', 0)", "element_count('#list li', 2)"]},
        solution=["click({button 'Remove'#2})"],
        wrong=["click({button 'Remove'#1})", "send_msg_to_user('Removed.')"],
    ),
    Problem(
        slug="pick-a-day",
        level=2,
        tags=["calendar"],
        text="Choose 29 March 2031 in the calendar.",
        config={"html": CALENDAR},
        evaluation={"reward_function": "element_text_equals('#state', 'Chosen: 2031-03-29')"},
        solution=["click({button 'Later'})\nclick({button 'Later'})", "click({button '29'})"],
    ),
    Problem(
        slug="accept-terms",
        level=2,
        tags=["scroll"],
        text="Accept the terms; they have to be read to their end.",
        config={"html": TERMS},
        evaluation={"reward_function": "element_text_equals('#state', 'Accepted')"},
        solution=["scroll_at(120, 150, 0, 5000)", "click({button 'Accept'})"],
    ),
    Problem(
        slug="station-suggestion",
        level=2,
        tags=["autocomplete"],
        text="Choose the station North Harbour from the suggestions.",
        config={"html": SUGGEST},
        evaluation={"reward_function": "element_text_equals('#state', 'Station: North Harbour')"},
        solution=["fill({textbox 'Station'}, 'nort', True)", "click({option 'North Harbour'})"],
    ),
]
