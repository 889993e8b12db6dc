"""Forms: fields, choices, validation before acceptance, and signing in."""

from __future__ import annotations

from .problem import BY_ID, Problem, page

LOGIN = page(
    "Sign in",
    "<h1>Intranet</h1><form id=form><label>User <input id=user autocomplete=off></label>"
    "<label>Password <input id=password type=password></label><button id=login-button>Sign in</button></form>"
    "<p id=message role=alert></p>",
    BY_ID
    + """by('form').addEventListener('submit', event => { event.preventDefault();
if (by('user').value === 'admin' && by('password').value === '1234') {
  sessionStorage.setItem('user', 'admin'); location.href = '/dashboard';
} else by('message').textContent = 'Unknown user or wrong password'; });""",
)
DASHBOARD = page(
    "Dashboard",
    "<h1 id=welcome hidden>Welcome, admin</h1>",
    "if (sessionStorage.getItem('user')) document.getElementById('welcome').hidden = false;"
    "else location.replace('/login');",
)
CONTACT = page(
    "Contact",
    "<h1>Contact us</h1><form id=form><p><label>Name <input id=name required></label></p>"
    "<p><label>E-mail <input id=mail type=email required></label></p>"
    "<p><label>Topic <select id=topic><option>General<option>Billing<option>Careers</select></label></p>"
    "<p><label>Message <textarea id=text required></textarea></label></p>"
    "<p><label><input id=consent type=checkbox required> I agree to be answered by e-mail</label></p>"
    "<button>Send</button></form><p id=receipt role=status></p>",
    BY_ID
    + """by('form').addEventListener('submit', event => { event.preventDefault();
by('receipt').textContent = ['name', 'mail', 'topic', 'text'].map(id => by(id).value).join(' | '); });""",
)
PREFERENCES = page(
    "Newsletters",
    "<h1>Newsletters</h1>"
    + "".join(
        f"<p><label><input type=checkbox id={name.lower()}{' checked' if on else ''}> {name}</label></p>"
        for name, on in (("Science", False), ("Sports", True), ("Music", False), ("Travel", True), ("Food", False))
    )
    + "<button id=save>Save</button><p id=state role=status></p>",
    BY_ID
    + """by('save').addEventListener('click', () => { by('state').textContent = 'Saved: ' +
[...document.querySelectorAll('input:checked')].map(box => box.id).join(', '); });""",
)
BOOKING = page(
    "Room booking",
    "<h1>Book a room</h1><form id=form><p><label>Day <input id=day type=date required></label></p>"
    "<p><label>From <input id=from type=time required></label></p>"
    "<fieldset><legend>Room</legend>"
    + "".join(
        f"<label><input type=radio name=room value={room.lower()}> {room}</label>" for room in ("Oak", "Birch", "Elm")
    )
    + "</fieldset><p><label>People <input id=people type=number min=1 max=12 value=1></label></p>"
    "<button>Book</button></form><p id=receipt role=status></p>",
    BY_ID
    + """by('form').addEventListener('submit', event => { event.preventDefault();
const room = document.querySelector('input[name=room]:checked');
by('receipt').textContent = room ? [by('day').value, by('from').value, room.value, by('people').value].join(' ')
  : 'Choose a room'; });""",
)
REGISTER = page(
    "Register",
    "<h1>Register</h1><p>A password has at least 8 characters, a digit and a capital letter.</p><form id=form>"
    "<p><label>User name <input id=user></label></p><p><label>Password <input id=first type=password></label></p>"
    "<p><label>Repeat password <input id=second type=password></label></p><button>Register</button></form>"
    "<p id=message role=alert></p>",
    BY_ID
    + """by('form').addEventListener('submit', event => { event.preventDefault();
const [user, first, second] = ['user', 'first', 'second'].map(id => by(id).value);
const wrong = user.length < 3 ? 'The name is too short' : !/^(?=.*[0-9])(?=.*[A-Z]).{8,}$/.test(first)
  ? 'The password is too weak' : first !== second ? 'The passwords differ' : '';
by('message').textContent = wrong || 'Registered ' + user; if (!wrong) localStorage.setItem('account', user); });""",
)
SETTINGS = page(
    "Settings",
    "<h1>Settings</h1><p id=who></p><label>Language <select id=language><option value=en>English"
    "<option value=de>Deutsch<option value=fr>Français</select></label><button id=save>Save</button>"
    "<p id=state role=status></p>",
    BY_ID
    + """by('who').textContent = 'Signed in as ' + (document.cookie.match(/user=(\\w+)/) || ['', 'nobody'])[1];
by('language').value = localStorage.getItem('language');
by('save').addEventListener('click', () => { localStorage.setItem('language', by('language').value);
by('state').textContent = 'Saved'; });""",
)
VOLUME = page(
    "Player",
    "<h1>Player</h1><label>Volume <input id=volume type=range min=0 max=10 value=3></label>"
    "<output id=shown>3</output><button id=keep>Keep</button><p id=state role=status></p>",
    BY_ID
    + """by('volume').addEventListener('input', () => { by('shown').textContent = by('volume').value; });
by('keep').addEventListener('click', () => { by('state').textContent = 'Volume kept at ' + by('volume').value; });""",
)
ADDRESS = page(
    "Address",
    "<h1>Delivery</h1><iframe title=Address src=/address width=400 height=160></iframe>"
    "<p>Then <button id=done>Check</button></p><p id=state role=status></p>",
    BY_ID
    + """by('done').addEventListener('click', () => { const saved = localStorage.getItem('city');
by('state').textContent = saved ? 'Delivery to ' + saved : 'No address yet'; });""",
)
ADDRESS_FRAME = page(
    "Address form",
    "<label>City <input id=city></label><button id=save>Save</button>",
    BY_ID + "by('save').addEventListener('click', () => localStorage.setItem('city', by('city').value));",
)

TRAIN = [
    Problem(
        slug="login-test",
        level=1,
        tags=["form", "login"],
        text="Log in as the user admin with the password 1234.",
        config={"start_url": "http://localhost:8000/login", "pages": {"/login": LOGIN, "/dashboard": DASHBOARD}},
        evaluation={"all": ["check_url_contains('dashboard')", "element_present('#welcome')"]},
        solution=["fill({textbox 'User'}, 'admin')\nfill({textbox 'Password'}, '1234')", "click({button 'Sign in'})"],
        wrong=["goto('http://localhost:8000/dashboard')", "send_msg_to_user('I am in.')"],
    ),
    Problem(
        slug="contact-form",
        level=1,
        tags=["form"],
        text="Send the message 'Please resend invoice 77.' about Billing as Ada Byron, ada@example.org. Agree to be "
        "answered by e-mail.",
        config={"html": CONTACT},
        evaluation={
            "reward_function": "element_text_equals('#receipt', "
            "'Ada Byron | ada@example.org | Billing | Please resend invoice 77.')"
        },
        solution=[
            "fill({textbox 'Name'}, 'Ada Byron')\nfill({textbox 'E-mail'}, 'ada@example.org')",
            "select_option({combobox 'Topic'}, 'Billing')\nfill({textbox 'Message'}, 'Please resend invoice 77.')",
            "click({checkbox 'I agree})\nclick({button 'Send'})",
        ],
    ),
    Problem(
        slug="newsletter-choice",
        level=1,
        tags=["form", "checkbox"],
        text="Subscribe to exactly Science and Travel, and save.",
        config={"html": PREFERENCES},
        evaluation={"reward_function": "element_text_equals('#state', 'Saved: science, travel')"},
        solution=["click({checkbox 'Science'})\nclick({checkbox 'Sports'})", "click({button 'Save'})"],
        wrong=["click({checkbox 'Science'})\nclick({button 'Save'})", "send_msg_to_user('Saved.')"],
    ),
    Problem(
        slug="room-booking",
        level=2,
        tags=["form", "date", "radio"],
        text="Book the room Birch for 8 people on 14 March 2031 from half past nine in the morning.",
        config={"html": BOOKING},
        evaluation={"reward_function": "element_text_equals('#receipt', '2031-03-14 09:30 birch 8')"},
        solution=[
            "fill({Date 'Day'}, '2031-03-14')\nfill({InputTime 'From'}, '09:30')",
            "click({radio 'Birch'})\nfill({spinbutton 'People'}, '8')",
            "click({button 'Book'})",
        ],
    ),
    Problem(
        slug="register",
        level=2,
        tags=["form", "validation"],
        text="Register the user name morgan with a password of your choice that is accepted.",
        config={"html": REGISTER},
        evaluation={
            "all": ["element_text_equals('#message', 'Registered morgan')", "local_storage_equals('account', 'morgan')"]
        },
        solution=[
            "fill({textbox 'User name'}, 'morgan')\nfill({textbox 'Password'}, 'weak')\nclick({button 'Register'})",
            "fill({textbox 'Password'}, 'Strong2031')\nfill({textbox 'Repeat password'}, 'Strong2031')",
            "click({button 'Register'})",
        ],
    ),
]
TEST = [
    Problem(
        slug="language-setting",
        level=1,
        tags=["form", "storage"],
        text="Switch the language to German and save.",
        config={
            "html": SETTINGS,
            "cookies": [{"name": "user", "value": "kim"}],
            "local_storage": {"language": "fr"},
        },
        evaluation={"all": ["local_storage_equals('language', 'de')", "cookie_equals('user', 'kim')"]},
        solution=["select_option({combobox 'Language'}, 'Deutsch')", "click({button 'Save'})"],
    ),
    Problem(
        slug="volume-slider",
        level=2,
        tags=["form", "keyboard"],
        text="Set the volume to 7 and keep it.",
        config={"html": VOLUME},
        evaluation={"reward_function": "element_text_equals('#state', 'Volume kept at 7')"},
        solution=["focus({slider 'Volume'})\n" + "keyboard_press('ArrowRight')\n" * 4, "click({button 'Keep'})"],
    ),
    Problem(
        slug="framed-address",
        level=3,
        tags=["form", "frame"],
        text="Enter Lisbon as the city in the embedded address form and save it there; then press Check.",
        config={"html": ADDRESS, "pages": {"/address": ADDRESS_FRAME}},
        evaluation={"all": ["element_text_equals('#state', 'Delivery to Lisbon')"]},
        solution=["fill({textbox 'City'}, 'Lisbon')\nclick({button 'Save'})", "click({button 'Check'})"],
    ),
]
